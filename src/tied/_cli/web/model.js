// The model: names as a tree in columns, and the ties between them. Knows nothing of the page.

const data = JSON.parse(document.getElementById("data").textContent);
const N = data.depth.length;
const STORAGE = 1, ALIAS = 2, COMPUTED = 3, SPAN = 4; // what is at a node; 0 for a branch
const parent = new Int32Array(N);
const end = new Int32Array(N); // behind the last node of a branch
const role = new Uint8Array(N);
const bytes = new Float64Array(N); // of storages, with all that is in the branch
const before = new Float64Array(N); // the bytes of all nodes above
const elements = new Float64Array(N);
const tensors = new Int32Array(N); // names in a branch
const linksOf = new Map(); // node -> the ties that it takes part in
const links = []; // {type, to: the storage, from: [{node, how}]}
const missed = new Uint8Array(N);

function readTree() {
  const path = [];
  for (let i = 0; i < N; i++) {
    while (path.length > data.depth[i]) end[path.pop()] = i;
    parent[i] = path.length ? path[path.length - 1] : -1;
    path.push(i);
    role[i] = data.kind[i] ? STORAGE : 0;
  }
  while (path.length) end[path.pop()] = N;
  for (const [node] of data.aliases) role[node] = ALIAS;
  for (const [node] of data.computed) if (!role[node]) role[node] = COMPUTED;
  for (const node of data.spans) role[node] = SPAN;
  const missing = data.missed === true ? data.aliases.map((alias) => alias[0]) : data.missed;
  for (const node of missing) missed[node] = 1;
}

function sumUp() {
  let sum = 0;
  for (let i = 0; i < N; i++) {
    before[i] = sum;
    if (isStored(i)) {
      bytes[i] = data.kinds[data.kind[i] - 1][2];
      elements[i] = data.kinds[data.kind[i] - 1][3];
      sum += bytes[i];
    }
    tensors[i] = role[i] && role[i] !== SPAN ? 1 : 0;
  }
  for (let i = N - 1; i >= 0; i--) {
    const up = parent[i];
    if (up < 0) continue;
    bytes[up] += bytes[i];
    elements[up] += elements[i];
    tensors[up] += tensors[i];
  }
  return sum;
}

function readLinks() {
  const groups = new Map();
  const add = (type, to, from) => {
    const key = type + to;
    if (!groups.has(key)) {
      const link = { type, to, from: [] };
      groups.set(key, link);
      links.push(link);
    }
    groups.get(key).from.push(from);
  };
  for (const [node, to, how] of data.aliases) add("tie", to, { node, how });
  for (const [node, to, how, kind] of data.lost || []) add("lost", to, { node, how, kind });
  for (const [node, sources] of data.computed) {
    for (const to of sources) add("computed", to, { node, how: null });
  }
  for (const link of links) {
    for (const node of members(link)) {
      if (!linksOf.has(node)) linksOf.set(node, []);
      linksOf.get(node).push(link);
    }
  }
  links.sort((a, b) => bytes[b.to] - bytes[a.to] || a.to - b.to);
}

const isStored = (i) => role[i] === STORAGE || role[i] === SPAN;
const isBranch = (i) => end[i] > i + 1;
const members = (link) => [link.to, ...link.from.map((from) => from.node)];
const label = (i) => data.words[data.word[i]];
const kindOf = (i) => (data.kind[i] ? data.kinds[data.kind[i] - 1] : null);

function nameOf(i) {
  const parts = [];
  for (let at = i; at >= 0; at = parent[at]) parts.push(label(at));
  return parts.reverse().join(".");
}

// How a name reads a storage, as a person writes it: `= embed.weight.T`.
function howOf(link, from) {
  if (link.type === "computed") return "computed from " + nameOf(link.to);
  const sign = link.type === "lost" ? "\u2248\u00a0" : "=\u00a0";
  return typeof from.how === "string" ? sign + nameOf(link.to) + from.how : "reads " + from.how[0];
}

// The ties of a node as sentences, those that it reads before those that read it.
function sentences(i) {
  const said = [];
  const sources = [];
  for (const link of linksOf.get(i) || []) {
    for (const from of link.from) {
      if (from.node !== i) continue;
      if (link.type === "computed") sources.push(nameOf(link.to));
      else said.push(howOf(link, from));
    }
  }
  if (sources.length) said.push("computed from " + sources.join(", "));
  return said;
}

// A text from the file, with what can't be seen, or would turn the text around, spelled out.
function shown(text, most = 300) {
  const cut = text.length > most ? text.slice(0, most) + "\u2026" : text;
  const seen = cut.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/gu, (c) =>
    "\\u{" + c.codePointAt(0).toString(16) + "}");
  return seen.trim() === "" ? JSON.stringify(seen) : seen;
}

function saidBytes(count) {
  let amount = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024 || unit === "GiB") {
      return unit === "B" ? count + " B" : amount.toFixed(2) + " " + unit;
    }
    amount /= 1024;
  }
}

const grouped = (count) => count.toLocaleString("en-US");
const counted = (count, one) => grouped(count) + " " + (count === 1 ? one : one + "s");

function percent(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  return share && share < 0.1 ? "< 0.1 %" : share.toFixed(share < 10 ? 1 : 0) + " %";
}

readTree();
const totalBytes = sumUp();
readLinks();
