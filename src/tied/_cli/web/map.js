// The strip: the bytes of the model to scale, from left to right, and its ties as arcs above it.

const LEVELS = 4;
const LEVEL = 18; // pixels of height
const MANY_ARCS = 40;
const strip = document.getElementById("strip");
const crumbs = document.getElementById("crumbs");
let zoomed = -1; // the branch that is drawn; -1 for all

function drawMap() {
  const width = Math.max(200, strip.parentNode.clientWidth);
  const [low, high] = zoomed < 0 ? [0, N] : [zoomed, end[zoomed]];
  const start = low < N ? before[low] : 0;
  const whole = (high < N ? before[high] : totalBytes) - start;
  const x = (i) => (whole ? ((before[i] - start) / whole) * width : 0);
  const span = (i) => (whole ? (bytes[i] / whole) * width : 0);
  let arcs = arcsBetween(low, high, x, span, width, 1);
  strip.classList.toggle("dense", arcs.length > MANY_ARCS);
  if (arcs.length > MANY_ARCS) arcs = arcsBetween(low, high, x, span, width, 12);
  const sky = arcs.reduce((most, arc) => Math.max(most, arc.height), 0) + (arcs.length ? 4 : 1);
  const boxes = boxesOf(low, high, x, span);
  const levels = new Map(boxes.map((box) => [box.node, box.level]));
  strip.setAttribute("viewBox", `0 0 ${width} ${sky + LEVELS * LEVEL + 1}`);
  strip.setAttribute("height", sky + LEVELS * LEVEL + 1);
  strip.setAttribute("aria-label", mapInWords(low, high, whole));
  strip.replaceChildren(...boxes.map((box) => drawBox(box, sky)),
    ...arcs.map((arc) => drawArc(arc, sky, levels)));
  drawCrumbs();
  drawLegend(whole);
}

// Boxes of at least half a pixel; what is smaller stays in the box of its branch.
function boxesOf(low, high, x, span) {
  const boxes = [];
  const base = zoomed < 0 ? 0 : data.depth[zoomed] + (isBranch(zoomed) ? 1 : 0);
  for (let i = zoomed >= 0 && isBranch(zoomed) ? low + 1 : low; i < high; ) {
    const level = data.depth[i] - base;
    if (span(i) < 0.5 || level >= LEVELS) {
      i = end[i];
      continue;
    }
    const split = level < LEVELS - 1 && childrenOf(i).some((inner) => span(inner) >= 0.5);
    const rows = split ? 1 : LEVELS - level;
    boxes.push({ node: i, x: x(i), width: span(i), level, rows });
    i++;
  }
  return boxes;
}

function drawBox(box, sky) {
  const gap = box.width > 3 ? 1 : 0;
  const y = sky + box.level * LEVEL;
  const tie = (linksOf.get(box.node) || []).map((link) => link.type);
  const style = tie.includes("tie") ? "tie" : tie.includes("lost") ? "lost" : "plain";
  const group = svg("g", { class: `box ${style} level${box.level}`, "data-node": box.node },
    svg("rect", { x: box.x, y, width: Math.max(0.5, box.width - gap), height: box.rows * LEVEL - 1 }),
    svg("title", {}, `${shown(nameOf(box.node))}\n${saidBytes(bytes[box.node])}, ` +
      `${percent(bytes[box.node], totalBytes)} of all`));
  const text = shown(label(box.node), 200);
  const room = Math.floor((box.width - 7) / 6.7);
  const first = text.split(".")[0];
  const fits = text.length <= room ? text : room > 5 ? text.slice(0, room - 1) + "\u2026"
    : first.length <= room ? first : "";
  const x = box.x + (box.width < 40 ? 3 : 5);
  if (fits) group.append(svg("text", { x, y: y + 12.5 }, fits));
  return group;
}

// Arcs that begin and end at the same pixels are one.
function arcsBetween(low, high, x, span, width, grain) {
  const found = new Map();
  const inside = (node) => node >= low && node < high;
  const beside = { tie: 0, lost: 6, computed: -6 }; // where arcs of two sorts would be one line
  const middle = (node, type) => {
    const aside = isStored(node) && span(node) > 24 ? beside[type] : 0;
    const at = x(node) + (isStored(node) ? span(node) / 2 : 0) + aside;
    return Math.min(width - 1.5, Math.max(1.5, grain > 1 ? Math.round(at / grain) * grain : at));
  };
  for (const link of links) {
    if (!inside(link.to)) continue;
    for (const from of link.from) {
      if (!inside(from.node)) continue;
      const a = middle(link.to, link.type);
      const b = middle(from.node, link.type);
      const key = [link.type, Math.round(a), Math.round(b)].join();
      if (found.has(key)) {
        found.get(key).links.push([link, from]);
        continue;
      }
      found.set(key, { type: link.type, a, b, height: 0, links: [[link, from]] });
    }
  }
  return stacked([...found.values()]);
}

// Wide arcs go over narrow ones.
function stacked(arcs) {
  const ends = (arc) => [Math.min(arc.a, arc.b), Math.max(arc.a, arc.b)];
  const levels = Array.from({ length: 6 }, () => []);
  arcs.sort((p, q) => Math.abs(p.a - p.b) - Math.abs(q.a - q.b));
  for (const arc of arcs) {
    const [low, high] = ends(arc);
    const free = (level) => level.every(([from, to]) => to + 4 < low || high + 4 < from);
    let level = levels.findLastIndex((taken) => !free(taken)) + 1;
    level = Math.min(level, levels.length - 1);
    levels[level].push([low, high]);
    arc.height = 16 + 9 * level;
  }
  return arcs;
}

function drawArc(arc, sky, levels) {
  const [link, from] = arc.links[0];
  const foot = (node) => sky + (levels.get(node) || 0) * LEVEL; // on the box of the node
  const [low, high] = [foot(link.to), foot(from.node)];
  const middle = (arc.a + arc.b) / 2;
  const top = sky - arc.height;
  const turn = Math.sign(arc.b - arc.a) * Math.min(Math.abs(arc.b - arc.a) / 2, 14);
  const path = Math.abs(arc.b - arc.a) < 10
    ? `M${arc.a} ${low}V${sky}C${middle - 9} ${top + 2} ${middle + 9} ${top + 2} ${arc.b} ${sky}V${high}`
    : `M${arc.a} ${low}V${top + 14}Q${arc.a} ${top} ${arc.a + turn} ${top}` +
      `H${arc.b - turn}Q${arc.b} ${top} ${arc.b} ${top + 14}V${high}`;
  const lines = arc.links.slice(0, 6).map(([to, one]) =>
    `${shown(nameOf(one.node))} ${shown(howOf(to, one))}`);
  if (arc.links.length > 6) lines.push(`and ${counted(arc.links.length - 6, "more tie")}`);
  return svg("g", { class: `arc ${arc.type}`, "data-node": from.node },
    svg("path", { d: path, class: "catch" }), svg("path", { d: path }),
    svg("circle", { cx: arc.a, cy: low, r: 3, class: "source" }),
    svg("circle", { cx: arc.b, cy: high, r: 3, class: "reader" }),
    svg("title", {}, lines.join("\n")));
}

function markMap(nodes) {
  const marked = new Set(nodes);
  for (const group of strip.querySelectorAll("[data-node]")) {
    group.classList.toggle("on", marked.has(Number(group.dataset.node)));
  }
}

function mapInWords(low, high, whole) {
  const parts = [];
  const first = zoomed >= 0 && isBranch(zoomed) ? low + 1 : low;
  for (let i = first; i < high; i = end[i]) parts.push(i);
  parts.sort((a, b) => bytes[b] - bytes[a]);
  const largest = parts.slice(0, 5).map((i) => `${shown(label(i), 60)} ${percent(bytes[i], whole)}`);
  return `Bytes to scale, ${saidBytes(whole)}: ${largest.join(", ")}. The tree below has the same.`;
}

function drawCrumbs() {
  crumbs.replaceChildren();
  crumbs.hidden = zoomed < 0;
  if (zoomed < 0) return;
  const path = [];
  for (let at = zoomed; at >= 0; at = parent[at]) path.push(at);
  for (const node of [-1, ...path.reverse()]) {
    const name = node < 0 ? "All" : shown(label(node), 40);
    const crumb = element(node === zoomed ? "b" : "button", { text: name });
    if (node !== zoomed) crumb.addEventListener("click", () => zoom(node));
    crumbs.append(crumb, node === zoomed ? "" : " › ");
  }
}

function drawLegend(whole) {
  const parts = [["plain", `${saidBytes(whole)} to scale`]];
  const types = new Set(links.map((link) => link.type));
  if (types.has("tie")) parts.push(["tie", "read by several names"]);
  if (types.has("lost")) parts.push(["lost", "same values, stored again: a lost tie?"]);
  if (types.has("computed")) parts.push(["computed", "computed by the model"]);
  const legend = document.getElementById("legend");
  legend.replaceChildren(...parts.map(([style, text]) =>
    element("span", { class: style }, element("i", { "aria-hidden": "true" }), text)));
}

function zoom(node) {
  zoomed = node;
  drawMap();
  markMap(marksOf(active));
}
