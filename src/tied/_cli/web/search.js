// Which rows there are: what is folded, and what a search or a filter leaves.

const open = new Uint8Array(N); // unfolded while nothing is searched
const openFound = new Uint8Array(N); // unfolded in what was found
const rowOf = new Int32Array(N); // the row in which a node is, or that of the branch that hides it
const posInSet = new Int32Array(N);
const setSize = new Int32Array(N + 1); // of the children of a node; of the roots, last
let keep = null; // what was found, and what leads there; null for everything
let hits = null; // what was found itself
let rows = new Int32Array(0);
let lowered = null; // names in small letters, made when first searched

const FILTERS = [
  ["all", "All", null],
  ["tied", "Tied", (i) => (linksOf.get(i) || []).some((link) => link.type === "tie"),
    "Names that take part in a tie"],
  ["lost", "Lost", (i) => (linksOf.get(i) || []).some((link) => link.type === "lost"),
    "Names with the values of another one, and those others"],
  ["computed", "Computed", (i) => (linksOf.get(i) || []).some((l) => l.type === "computed"),
    "Names that the model computes, and what it computes them from"],
  ["missed", "Missed", (i) => missed[i] === 1, "Names that a loader misses if it knows no ties"],
];

function lowerNames() {
  lowered = new Array(N);
  for (let i = 0; i < N; i++) {
    const own = label(i).toLowerCase();
    lowered[i] = parent[i] < 0 ? own : lowered[parent[i]] + "." + own;
  }
}

// Keeps the names in which all words are, and of the kind that is asked for.
function find(query, test) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length && !test) {
    keep = hits = null;
    return tensors.reduce((sum, count, i) => (parent[i] < 0 ? sum + count : sum), 0);
  }
  if (words.length && !lowered) lowerNames();
  keep = new Uint8Array(N);
  hits = new Uint8Array(N);
  openFound.fill(1);
  let count = 0;
  for (let i = 0; i < N; i++) {
    if (!role[i] || (test && !test(i))) continue;
    if (!words.every((word) => lowered[i].includes(word))) continue;
    hits[i] = 1;
    count++;
    for (let at = i; at >= 0 && !keep[at]; at = parent[at]) keep[at] = 1;
  }
  return count;
}

function isOpen(i) {
  return Boolean(keep ? openFound[i] : open[i]);
}

// Whether there is something to unfold.
function unfolds(i) {
  return isBranch(i) && (!keep || hasKept(i));
}

function hasKept(i) {
  for (let at = i + 1; at < end[i]; at = end[at]) if (keep[at]) return true;
  return false;
}

function setOpen(i, value) {
  (keep ? openFound : open)[i] = value ? 1 : 0;
}

function listRows() {
  const list = [];
  setSize.fill(0);
  for (let i = 0; i < N; ) {
    if (keep && !keep[i]) {
      rowOf.fill(-1, i, end[i]);
      i = end[i];
      continue;
    }
    rowOf[i] = list.length;
    list.push(i);
    posInSet[i] = ++setSize[parent[i] < 0 ? N : parent[i]];
    if (isBranch(i) && !isOpen(i)) {
      for (let at = i + 1; at < end[i]; at++) rowOf[at] = keep && !keep[at] ? -1 : rowOf[i];
      i = end[i];
    } else {
      i++;
    }
  }
  rows = Int32Array.from(list);
}

function childrenOf(i) {
  const children = [];
  for (let at = i + 1; at < end[i]; at = end[at]) children.push(at);
  return children;
}

// At first the outer branches are unfolded, as many as one sees at a time, and what is tied.
function unfoldAtFirst(room = 30) {
  if (N <= 60) {
    open.fill(1);
    return;
  }
  let level = [];
  let count = 0;
  for (let i = 0; i < N; i = end[i], count++) level.push(i);
  while (level.length) {
    const inner = level.map(childrenOf);
    const all = inner.reduce((sum, children) => sum + children.length, 0);
    if (count + all > room && level.filter(isBranch).length > 4) break; // alike, as layers are
    const next = [];
    level.forEach((i, at) => {
      if (!inner[at].length || count + inner[at].length > room) return;
      open[i] = 1;
      count += inner[at].length;
      next.push(...inner[at]);
    });
    level = next;
  }
  const tied = links.slice(0, 4).flatMap((link) => members(link).slice(0, 4));
  for (const node of tied) {
    const path = [];
    for (let at = parent[node]; at >= 0; at = parent[at]) path.push(at);
    const siblings = parent[node] < 0 ? 0 : end[parent[node]] - parent[node];
    if (siblings < 30 && path.length < 8) for (const at of path) open[at] = 1;
  }
}
