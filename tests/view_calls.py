"""How to call each public function of JAX that takes an array: the table of `test_view_jax_2.py`.

An entry is the names of functions, a colon, and how each of them is called. In a call, `f` is the
function and the letters are arrays, of 4 x 4 unless said otherwise: `x y` of numbers between 0 and
1, `s` symmetric and positive, `z` complex, `n m` of small integers, `u` of bytes, `b` of booleans,
`v w` of 4 numbers, `k` of 4 integers, `t` of 4 x 4 x 4 numbers, `a` a number and `i` an integer
without axes. `key` is a random key, and no view. `!` before a call: not inside `jit`, where JAX
would need values that it has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

NUMPY = """
abs absolute acos acosh all amax amin angle any arccos arccosh arcsin arcsinh arctan arctanh
argmax argmin argsort around array asarray asin asinh atan atanh atleast_1d atleast_2d atleast_3d
average cbrt ceil conj conjugate copy corrcoef cos cosh count_nonzero cov cumprod cumsum deg2rad
degrees diag diagflat diagonal diff ediff1d empty_like exp exp2 expm1 fabs flip fliplr flipud
floor frexp gradient i0 imag iscomplex iscomplexobj isfinite isinf isnan isneginf isposinf isreal
isrealobj isscalar log log10 log1p log2 matrix_transpose max mean median min modf nan_to_num
nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum
nanvar ndim negative ones_like positive prod ptp rad2deg radians ravel real reciprocal rint rot90
round shape sign signbit sin sinc sinh size sort sort_complex spacing sqrt square squeeze std sum
tan tanh trace transpose trapezoid tril triu trunc unstack unwrap var zeros_like iterable: f(x)
permute_dims: f(x, (1, 0))
angle conj conjugate imag real sort_complex iscomplex: f(z)
vander i0 cumulative_prod cumulative_sum ediff1d unwrap diagflat: f(v)
add arctan2 atan2 allclose array_equal array_equiv copysign divide equal float_power fmax fmin
fmod floor_divide greater greater_equal heaviside hypot isclose kron less less_equal logaddexp
logaddexp2 matmul maximum minimum mod multiply nextafter not_equal outer polyadd power remainder
subtract true_divide vecdot divmod dot inner: f(x, y)
vdot convolve correlate polymul polydiv polysub polyadd: f(v, w)
cross: f(v[:3], w[:3])
bitwise_count bitwise_invert bitwise_not invert: f(n)
bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift left_shift right_shift
gcd lcm: f(n, m)
pow: f(x, n)
ldexp: f(x, n)
logical_and logical_or logical_xor: f(b, x)
logical_not: f(b)
flatnonzero nonzero: f(n, size=16)
append: f(x, y)
apply_over_axes: f(jnp.sum, x, (0,))
argpartition partition: f(x, 2)
argwhere trim_zeros unique unique_all unique_counts unique_inverse unique_values: !f(k)
array_split split hsplit vsplit: f(x, 2)
dsplit: f(t, 2)
astype: f(x, 'int32')
bincount: f(k, length=8)
block: f([[x, y], [y, x]])
broadcast_arrays: f(x, v)
broadcast_to: f(x, (2, 4, 4))
result_type: !f(x)
can_cast: f(n.dtype, 'float32')
choose: f(k % 2, (v, w), mode='clip')
clip: f(x, y, 0.8)
column_stack dstack hstack vstack stack concat concatenate: f([x, y])
compress: f(k > 0, x, axis=0, size=4)
delete: f(x, 1, axis=0)
diag_indices_from tril_indices_from triu_indices_from: f(x)
digitize searchsorted: f(jnp.sort(v), w)
digitize: f(w, jnp.sort(v))
einsum: f('ij,jk->ik', x, y)
einsum_path: !f('ij,jk->ik', x, y)
expand_dims: f(x, 0)
extract: f(b, x, size=16)
fill_diagonal: f(x, 0.5, inplace=False)
from_dlpack: !f(x)
full_like: f(x, 3)
full_like: f(x, a)
full: f((2,), a)
histogram histogram_bin_edges: f(x, 4)
histogram2d: f(v, w, 4)
histogramdd: f(x[:, :2], 4)
insert: f(x, 1, v, axis=0)
interp: f(x, jnp.sort(v), w)
intersect1d setdiff1d setxor1d union1d: !f(k, k + 1)
isin: f(n, k)
ix_: f(k, k)
lexsort: f((k, v))
linspace geomspace logspace: f(v, w + 1)
matvec: f(x, v)
vecmat: f(v, x)
meshgrid: f(v, w)
moveaxis swapaxes: f(t, 0, 2)
nanpercentile percentile: f(x, 30.0)
nanquantile quantile: f(x, 0.3)
nanpercentile percentile nanquantile quantile: f(x, v)
packbits unpackbits: f(u)
pad: f(x, 1)
piecewise: f(x, [b], [0.0, 1.0])
place: f(x, b, v, inplace=False)
poly: f(v)
roots: f(v, strip_zeros=False)
polyder polyint: f(v)
polyfit: f(v, w, 1)
polyval: f(v, x)
put: f(x, k, v, inplace=False)
put_along_axis: f(x, n % 4, y, axis=0, inplace=False)
ravel_multi_index: f((k % 4, k % 3), (4, 4), mode='clip')
repeat: f(x, 2)
repeat: f(v, k, total_repeat_length=8)
reshape: f(x, (2, 8))
resize: f(x, (3, 5))
roll: f(x, 1)
rollaxis: f(t, 2)
rot90: f(x, 2)
select: f([b], [x], 0.5)
take: f(x, k % 4, axis=0)
take_along_axis: f(x, n % 4, axis=0)
tensordot: f(x, y, 1)
tile: f(x, (2, 1))
unravel_index: f(k, (4, 4))
where: f(b, x, y)
vectorize: f(jnp.sin)(x)
frompyfunc: f(jnp.add, 2, 1)(x, y)
"""

LINALG = """
cholesky det eigh eigvalsh inv slogdet: f(s)
cond diagonal matrix_norm matrix_rank matrix_transpose norm pinv qr svd svdvals trace vector_norm:
f(x)
eig eigvals: f(x)
cross: f(v[:3], w[:3])
lstsq solve: f(s, v)
lstsq solve: f(x, y)
matmul outer vecdot: f(v, w)
tensordot: f(x, y, axes=1)
matmul: f(x, y)
matrix_power: f(x, 3)
multi_dot: f([x, y, v])
tensorinv: f(t[:, :, 0].reshape(2, 2, 4), 2)
tensorinv: f(x, 1)
tensorsolve: f(s, v)
"""

FFT = """
fft fft2 fftn hfft ifft ifft2 ifftn irfft irfft2 irfftn fftshift ifftshift: f(z)
ihfft rfft rfft2 rfftn: f(x)
"""

NN = """
celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
log_softmax logmeanexp logsumexp mish relu relu6 selu silu soft_sign softmax softplus sparse_plus
sparse_sigmoid squareplus standardize swish tanh: f(x)
log1mexp: f(x)
dot_product_attention: f(t, t, t)
dot_product_attention: f(t[None], t[None], t[None])
one_hot: f(k, 8)
"""

IMAGE = """
resize: f(x, (3, 5), 'linear')
scale_and_translate: f(x, (3, 5), (0, 1), v[:2] + 1, w[:2], 'linear')
"""

RANDOM = """
bernoulli categorical permutation choice: f(key, x)
bernoulli: f(key, a)
chisquare gamma geometric loggamma pareto poisson t wald: f(key, x)
beta f: f(key, x, y)
binomial: f(key, n, x)
lognormal rayleigh: f(key, x)
dirichlet: f(key, v)
choice: f(key, v, (2,), p=w / w.sum())
double_sided_maxwell: f(key, a, a, (2,))
fold_in: f(key, i)
PRNGKey key: f(i)
generalized_normal: f(key, a, (2,))
triangular: f(key, 0.0, x, 1.0)
weibull_min: f(key, x, y)
multinomial: f(key, 5.0, v / v.sum())
multivariate_normal: f(key, v, s)
randint: f(key, (4, 4), n, n + 5)
truncated_normal: f(key, x, x + 1)
uniform: f(key, (4, 4), minval=x, maxval=x + 1)
wrap_key_data: f(u[0, :2].astype('uint32'))
"""

SCIPY = """
cluster.vq.vq: f(x, y)
fft.dct fft.dctn fft.idct fft.idctn: f(x)
integrate.trapezoid: f(x)
linalg.block_diag: f(x, y)
linalg.cho_factor linalg.cholesky linalg.det linalg.eigh linalg.inv linalg.lu linalg.lu_factor:
f(s)
linalg.expm linalg.polar linalg.qr linalg.sqrtm linalg.svd: f(x)
linalg.cho_solve: f((jsp.linalg.cho_factor(s)[0], False), v)
linalg.cho_solve: f((s, True), v)
linalg.lu_solve: f((s, k % 4), v)
linalg.circulant linalg.companion linalg.fiedler linalg.fiedler_companion linalg.hankel
linalg.toeplitz: f(v)
linalg.convolution_matrix: f(v, 6)
linalg.leslie: f(v, w[:3])
linalg.eigh_tridiagonal: f(v, w[:3], eigvals_only=True)
linalg.expm_frechet: f(x, y)
linalg.funm: f(x, jnp.exp)
linalg.qr_multiply: f(x, y)
linalg.rsf2csf: f(x, y)
linalg.solve linalg.solve_triangular: f(s, v)
linalg.solve_sylvester: f(x, y, s)
ndimage.map_coordinates: f(x, (v, w), 1)
ndimage.map_coordinates: f(x, x[:2], 1)
signal.convolve signal.correlate signal.convolve2d signal.correlate2d signal.fftconvolve: f(x, y)
signal.csd: f(v, w, nperseg=4)
signal.detrend: f(x)
signal.stft signal.welch: f(v, nperseg=4)
signal.istft: f(z, nperseg=6)
special.bessel_jn: f(v, v=2)
special.beta special.betaln special.boxcox special.boxcox1p special.comb special.gammainc
special.gammaincc special.kl_div special.owens_t special.poch special.rel_entr special.xlog1py
special.xlogy: f(x, y)
special.betainc special.hyp1f1: f(x, y, y)
special.hyp2f1: f(x, y, y, x)
special.dawsn special.digamma special.entr special.erf special.erfc special.erfcx special.erfinv
special.exp1 special.expi special.expit special.factorial special.fresnel special.gamma
special.gammaln special.gammasgn special.i0 special.i0e special.i1 special.i1e special.log_ndtr
special.log_softmax special.loggamma special.logit special.logsumexp special.ndtr special.ndtri
special.sici special.softmax special.spence special.wofz: f(x)
special.expn: f(n, x)
special.multigammaln: f(x + 2, 2)
special.polygamma: f(n, x)
special.zeta: f(x + 1, y)
stats.mode stats.rankdata stats.sem: f(x)
stats.bernoulli.cdf stats.bernoulli.logpmf stats.bernoulli.pmf stats.geom.logpmf stats.geom.pmf
stats.poisson.cdf stats.poisson.logpmf stats.poisson.pmf: f(n, x)
stats.bernoulli.ppf: f(x, y)
stats.poisson.entropy: f(x)
stats.beta.cdf stats.beta.logcdf stats.beta.logpdf stats.beta.logsf stats.beta.pdf stats.beta.sf:
f(x, y, y)
stats.betabinom.logpmf stats.betabinom.pmf: f(n, n + m, x, y)
stats.binom.logpmf stats.binom.pmf stats.nbinom.logpmf stats.nbinom.pmf: f(n, n + m, x)
stats.cauchy.cdf stats.cauchy.isf stats.cauchy.logcdf stats.cauchy.logpdf stats.cauchy.logsf
stats.cauchy.pdf stats.cauchy.ppf stats.cauchy.sf stats.expon.cdf stats.expon.logcdf
stats.expon.logpdf stats.expon.logsf stats.expon.pdf stats.expon.ppf stats.expon.sf
stats.gumbel_l.cdf stats.gumbel_l.logcdf stats.gumbel_l.logpdf stats.gumbel_l.logsf
stats.gumbel_l.pdf stats.gumbel_l.ppf stats.gumbel_l.sf stats.gumbel_r.cdf stats.gumbel_r.logcdf
stats.gumbel_r.logpdf stats.gumbel_r.logsf stats.gumbel_r.pdf stats.gumbel_r.ppf stats.gumbel_r.sf
stats.laplace.cdf stats.laplace.logpdf stats.laplace.pdf stats.logistic.cdf stats.logistic.isf
stats.logistic.logpdf stats.logistic.pdf stats.logistic.ppf stats.logistic.sf stats.norm.cdf
stats.norm.logcdf stats.norm.logpdf stats.norm.logsf stats.norm.pdf stats.norm.ppf stats.norm.sf
stats.uniform.cdf stats.uniform.logpdf stats.uniform.pdf stats.uniform.ppf: f(x, y)
stats.chi2.cdf stats.chi2.logcdf stats.chi2.logpdf stats.chi2.logsf stats.chi2.pdf stats.chi2.sf
stats.gamma.cdf stats.gamma.logcdf stats.gamma.logpdf stats.gamma.logsf stats.gamma.pdf
stats.gamma.sf stats.gennorm.cdf stats.gennorm.logpdf stats.gennorm.pdf stats.pareto.cdf
stats.pareto.logcdf stats.pareto.logpdf stats.pareto.logsf stats.pareto.pdf stats.pareto.ppf
stats.pareto.sf stats.t.logpdf stats.t.pdf stats.vonmises.logpdf stats.vonmises.pdf
stats.wrapcauchy.logpdf stats.wrapcauchy.pdf: f(x, y)
stats.dirichlet.logpdf stats.dirichlet.pdf: f(v / v.sum(), w)
stats.multinomial.logpmf stats.multinomial.pmf: f(k, k.sum(), v / v.sum())
stats.multivariate_normal.logpdf stats.multivariate_normal.pdf: f(v, w, s)
stats.truncnorm.cdf stats.truncnorm.logcdf stats.truncnorm.logpdf stats.truncnorm.logsf
stats.truncnorm.pdf stats.truncnorm.sf: f(x, x - 1, x + 1)
"""

# What takes no array, or not as such, by the reason.
NO_ARRAY = """
arange bartlett blackman broadcast_shapes diag_indices empty eye fromfunction fromiter fromstring
get_printoptions hamming hanning identity indices isdtype issubdtype kaiser load mask_indices ones
printoptions promote_types set_printoptions tri tril_indices triu_indices zeros frombuffer
fromfile numpy.fft.fftfreq numpy.fft.rfftfreq nn.get_scaled_dot_general_config
scipy.special.bernoulli scipy.linalg.dft scipy.linalg.hadamard scipy.linalg.helmert
scipy.linalg.hilbert scipy.linalg.invhilbert scipy.linalg.invpascal scipy.linalg.pascal
random.ball random.bits random.cauchy random.exponential random.gumbel random.laplace
random.logistic random.maxwell random.normal random.orthogonal random.rademacher
"""
KEYS = "random.clone random.key_data random.key_dtype random.key_impl random.split"
NAMES_THE_TYPE = "array_repr array_str"  # they print View(...) for Array(...)
WRITES_A_FILE = "save savez"
FOR_ACCELERATORS = "nn.scaled_dot_general nn.scaled_matmul"  # of 8-bit numbers

# JAX gives these to jax.lax, or maps them, without its own conversion: a TieError says what to do.
REFUSED = """
nn.sigmoid: f(x)
scipy.linalg.hessenberg scipy.linalg.schur: f(x)
scipy.special.sph_harm_y: f(k, k, v, w, n_max=8)
scipy.stats.norm.isf: f(x, y)
apply_along_axis: f(jnp.sum, 0, x)
"""
# Their argument is a pytree, so a view is its base to them; they raise as the parts don't fit.
OF_PYTREES = """
scipy.sparse.linalg.cg scipy.sparse.linalg.gmres scipy.sparse.linalg.bicgstab: f(s, v)
scipy.optimize.minimize: f(lambda q: ((q - 1) ** 2).sum(), v, method='BFGS')
"""
GROUPS = {
    "numpy": NUMPY,
    "numpy.linalg": LINALG,
    "numpy.fft": FFT,
    "nn": NN,
    "image": IMAGE,
    "random": RANDOM,
    "scipy": SCIPY,
}


def calls(text: str) -> Iterator[tuple[str, str]]:
    """Gives each function's name and how it is called."""
    for names, call in re.findall(r"([^:]+):\s+(!?f\(.*)", text):
        yield from ((name, call) for name in names.split())


def names(text: str) -> list[str]:
    """The names in one of the lists above, as paths below `jax`; bare ones are of `jax.numpy`."""
    found = text.split() if ":" not in text else [name for name, _ in calls(text)]
    return [name if "." in name else f"numpy.{name}" for name in found]
