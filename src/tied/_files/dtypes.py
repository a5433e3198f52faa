"""The dtypes of safetensors: their codes, and what they are called elsewhere."""

from __future__ import annotations

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

NAMES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name, sizes in
       (("U", "uint", (8, 16, 32, 64)), ("I", "int", (8, 16, 32, 64)), ("F", "float", (16, 32, 64)))
       for bits in sizes},
}  # fmt: skip
CODES = {name: code for code, name in NAMES.items()}
