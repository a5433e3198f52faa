// The tree of names: only the rows that are to be seen are in the page.

const HEIGHT = 28;
const BEYOND = 12; // rows above and below what is seen
const MOST_ROWS = 500000; // browsers have no longer pages
const MOST_PRINTED = 3000;
const tree = document.getElementById("tree");
const wires = svg("svg", { class: "wires", "aria-hidden": "true" });
const cut = document.getElementById("cut");
const made = new Map(); // node -> its row
let active = -1;
let hovered = -1;
let printing = false;

function refresh() {
  listRows();
  listRuns();
  for (const row of made.values()) row.remove();
  made.clear();
  const hidden = active >= 0 && rowOf[active] >= 0 && rows[rowOf[active]] !== active;
  if (hidden) active = rows[rowOf[active]];
  tree.parentNode.style.setProperty("--gutter", gutterWidth() + "px");
  tree.style.height = Math.min(rows.length, MOST_ROWS) * HEIGHT + "px";
  tree.classList.toggle("empty", rows.length === 0);
  draw();
  if (hidden) drawPanel(active);
}

function draw() {
  const top = tree.getBoundingClientRect().top;
  let first = Math.max(0, Math.floor(-top / HEIGHT) - BEYOND);
  const most = printing ? MOST_PRINTED : MOST_ROWS;
  let last = Math.min(rows.length, most, Math.ceil((innerHeight - top) / HEIGHT) + BEYOND) - 1;
  if (printing) [first, last] = [0, Math.min(rows.length, most) - 1];
  cut.hidden = rows.length <= most;
  cut.textContent = `${grouped(rows.length - most)} more rows are not here: search, or fold.`;
  const wanted = new Set();
  for (let r = first; r <= last; r++) wanted.add(rows[r]);
  if (active >= 0 && rowOf[active] >= 0 && rows[rowOf[active]] === active) wanted.add(active);
  for (const [node, row] of made) {
    if (wanted.has(node)) continue;
    row.remove();
    made.delete(node);
  }
  const fresh = document.createDocumentFragment();
  for (const node of wanted) {
    if (made.has(node)) continue;
    const row = drawRow(node);
    made.set(node, row);
    fresh.append(row);
  }
  tree.append(fresh);
  if (!wires.parentNode) tree.append(wires);
  drawRuns(wires, first, Math.max(first, last), HEIGHT, isMarked);
  mark();
}

function drawRow(i) {
  const name = element("span", { class: "name" });
  name.style.setProperty("--depth", Math.min(data.depth[i], 16));
  name.append(element("span", { class: "fold", "aria-hidden": "true" }), marked(i));
  const said = sentences(i);
  if (said.length) name.append(element("code", { text: shown(said.join("; ")) }));
  const kind = kindOf(i);
  const many = isBranch(i) ? counted(tensors[i], "name") : "";
  const row = element("div", {
    role: "treeitem", id: "n" + i, class: "row " + styleOf(i), "aria-level": data.depth[i] + 1,
    "aria-posinset": posInSet[i], "aria-setsize": setSize[parent[i] < 0 ? N : parent[i]],
    "aria-label": inWords(i, said),
  }, name,
  element("span", { class: kind ? "shape" : "shape many", text: kind ? shown(kind[0], 60) : many }),
  element("span", { class: "dtype", text: kind ? shown(kind[1], 20) : "" }),
  element("span", { class: "bytes", text: isStored(i) || isBranch(i) ? saidBytes(bytes[i]) : "" }),
  bar(i));
  if (unfolds(i)) row.setAttribute("aria-expanded", isOpen(i));
  if (isStored(i)) {
    const readers = (linksOf.get(i) || []).filter((link) => link.to === i)
      .flatMap((link) => link.from.slice(0, 8).map((from) => `${nameOf(from.node)} ${howOf(link, from)}`));
    if (readers.length) row.title = readers.map((text) => shown(text)).join("\n");
  }
  row.style.top = rowOf[i] * HEIGHT + "px";
  return row;
}

function styleOf(i) {
  const types = (linksOf.get(i) || []).filter((l) => l.type !== "lost" || l.to !== i).map((l) => l.type);
  const what = ["branch", "storage", "alias", "computed", "span"][role[i]];
  return [what, ...new Set(types), hits && !hits[i] ? "path" : ""].join(" ").trim();
}

// The part of the name, with what was searched marked.
function marked(i) {
  const text = shown(label(i));
  const label_ = element("bdi", { dir: "ltr" });
  const words = hits && hits[i] ? query().split(/\s+/).filter(Boolean) : [];
  const lower = text.toLowerCase();
  const found = words.map((word) => [lower.indexOf(word.toLowerCase()), word.length])
    .filter(([at]) => at >= 0).sort((a, b) => a[0] - b[0]);
  let done = 0;
  for (const [at, length] of found) {
    if (at < done || lower.length !== text.length) continue;
    label_.append(text.slice(done, at), element("mark", { text: text.slice(at, at + length) }));
    done = at + length;
  }
  label_.append(text.slice(done));
  return label_;
}

// A bar where the bytes of the node are in all of them; of an alias, those that it reads.
function bar(i) {
  const box = element("span", { class: "bar" });
  const link = role[i] === ALIAS && !bytes[i] && linksOf.get(i).find((one) => one.type === "tie");
  const from = link ? link.to : i;
  if (totalBytes && bytes[from]) {
    const fill = element("i", link ? { class: "read" } : {});
    fill.style.left = Math.min(99.2, (100 * before[from]) / totalBytes) + "%";
    fill.style.width = Math.max(0.8, (100 * bytes[from]) / totalBytes) + "%";
    box.append(fill);
  }
  return box;
}

function inWords(i, said) {
  const kind = kindOf(i);
  const parts = [shown(label(i))];
  if (isBranch(i)) parts.push(counted(tensors[i], "name"));
  if (kind) parts.push(shown(kind[0], 60), shown(kind[1], 20));
  if (isStored(i) || isBranch(i)) parts.push(saidBytes(bytes[i]));
  const lost = (linksOf.get(i) || []).some((link) => link.type === "lost" && link.to !== i);
  parts.push(...said.map((text) => shown(text)), ...(lost ? ["a lost tie?"] : []));
  const readers = (linksOf.get(i) || []).filter((link) => link.to === i && link.type === "tie");
  if (readers.length) parts.push("read by " + counted(readers[0].from.length, "other name"));
  if (missed[i]) parts.push("missed by a loader that knows no ties");
  return parts.join(", ");
}

// The nodes that belong to what one points at: the node, and what shares its storage.
function marksOf(i) {
  if (i < 0) return [];
  return [i, ...(linksOf.get(i) || []).flatMap(members)];
}

function isMarked(run) {
  const node = hovered >= 0 ? hovered : active;
  if (node < 0) return false;
  const own = linksOf.get(node);
  if (own) return own.some((link) => run.links.includes(link));
  return isBranch(node) && rowOf[node] >= 0 && [run.to, ...run.from].includes(rowOf[node]);
}

function mark() {
  const marks = new Set(marksOf(hovered >= 0 ? hovered : active));
  for (const [node, row] of made) {
    row.classList.toggle("active", node === active);
    row.classList.toggle("with", marks.has(node) && node !== active && marks.size > 1);
    row.setAttribute("aria-selected", node === active);
  }
  if (active >= 0 && made.has(active)) tree.setAttribute("aria-activedescendant", "n" + active);
  else tree.removeAttribute("aria-activedescendant");
  markMap(marks);
}

function select(i, scroll = true) {
  active = i;
  drawPanel(i);
  if (i >= 0) {
    const under = document.getElementById("tools").getBoundingClientRect().bottom;
    const y = tree.getBoundingClientRect().top + rowOf[i] * HEIGHT;
    const room = innerHeight - bottomRoom() - HEIGHT - 8;
    if (y < under + 4 && scroll) scrollBy(0, y - under - 4);
    else if (y > room) scrollBy(0, y - room);
  }
  draw();
}

// Where the panel covers the end of a narrow window.
function bottomRoom() {
  return getComputedStyle(panel).position === "fixed" ? panel.getBoundingClientRect().height : 0;
}

// Shows a node, wherever it is folded away or filtered out.
function reveal(i, focus) {
  if (keep && !keep[i]) clearSearch();
  for (let at = parent[i]; at >= 0; at = parent[at]) setOpen(at, true);
  active = i;
  refresh();
  select(i);
  if (focus) tree.focus({ preventScroll: true });
}

function toggle(i, value) {
  if (!unfolds(i)) return;
  setOpen(i, value);
  refresh();
}
