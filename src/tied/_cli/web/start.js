// What one does with the page: keys, pointer, search, filters, theme, print.

const search = document.getElementById("search");
const filters = document.getElementById("filters");
const found = document.getElementById("found");
const theme = document.getElementById("theme");
let filter = FILTERS[0];
let typed = "";
let typedAt = 0;

const query = () => search.value.trim();

function applySearch() {
  const count = find(query(), filter[2]);
  const all = !query() && !filter[2];
  found.textContent = all ? counted(count, "name") : `${grouped(count)} found`;
  for (const button of filters.children) {
    button.setAttribute("aria-pressed", button.dataset.filter === filter[0]);
  }
  refresh();
}

function clearSearch() {
  search.value = "";
  filter = FILTERS[0];
  applySearch();
}

function makeFilters() {
  for (const entry of FILTERS) {
    let count = 0;
    for (let i = 0; i < N; i++) if (role[i] && role[i] !== SPAN && (!entry[2] || entry[2](i))) count++;
    if (entry[2] && !count) continue;
    const button = element("button", { "data-filter": entry[0], class: entry[0] }, entry[1] + " ",
      element("small", { text: grouped(count) }));
    if (entry[3]) button.title = entry[3];
    button.addEventListener("click", () => {
      filter = entry;
      applySearch();
    });
    filters.append(button);
  }
  filters.hidden = filters.children.length < 2;
}

// The keys of a tree, as the ARIA practices have them.
const KEYS = {
  ArrowDown: (r) => go(r + 1),
  ArrowUp: (r) => go(Math.max(0, r - 1)),
  Home: () => go(0),
  End: () => go(rows.length - 1),
  PageDown: (r) => go(Math.min(rows.length - 1, r + Math.floor(innerHeight / HEIGHT / 2))),
  PageUp: (r) => go(Math.max(0, r - Math.floor(innerHeight / HEIGHT / 2))),
  ArrowRight: (r) => {
    if (unfolds(active) && !isOpen(active)) toggle(active, true);
    else if (unfolds(active)) go(r + 1);
  },
  ArrowLeft: (r) => {
    if (unfolds(active) && isOpen(active)) toggle(active, false);
    else if (active >= 0 && parent[active] >= 0) go(rowOf[parent[active]]);
  },
  Enter: () => {
    if (!nextOfStorage()) toggle(active, !isOpen(active));
  },
  " ": () => toggle(active, !isOpen(active)),
  "*": () => {
    const up = active < 0 ? -1 : parent[active];
    for (let i = up + 1; i < (up < 0 ? N : end[up]); i = end[i]) setOpen(i, true);
    refresh();
  },
  z: () => {
    if (active >= 0) zoom(zoomed === active || !isBranch(active) ? -1 : active);
    drawPanel(active);
  },
  Escape: () => select(-1),
};

function go(r) {
  if (rows.length) select(rows[Math.min(r, rows.length - 1, MOST_ROWS - 1)]);
}

function nextOfStorage() {
  const own = active >= 0 && linksOf.get(active);
  if (!own) return false;
  const nodes = [...new Set(own.flatMap(members))].sort((a, b) => a - b);
  reveal(nodes[(nodes.indexOf(active) + 1) % nodes.length]);
  return true;
}

function typeAhead(key) {
  typed = Date.now() - typedAt > 700 ? key : typed + key;
  typedAt = Date.now();
  const start = active < 0 ? 0 : rowOf[active] + (typed.length === 1 ? 1 : 0);
  for (let step = 0; step < rows.length; step++) {
    const r = (start + step) % rows.length;
    if (label(rows[r]).toLowerCase().startsWith(typed.toLowerCase())) return go(r);
  }
}

tree.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.key === "/") return;
  const run = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : null;
  if (run && (event.key !== "z" || Date.now() - typedAt > 700)) run(active < 0 ? -1 : rowOf[active]);
  else if (event.key.length === 1) typeAhead(event.key);
  else return;
  event.preventDefault();
});
tree.addEventListener("focus", () => {
  if (active < 0 && rows.length && tree.matches(":focus-visible")) go(0);
});
tree.addEventListener("click", (event) => {
  const row = event.target.closest(".row");
  if (!row) return;
  const node = Number(row.id.slice(1));
  if (event.target.closest(".fold") || node === active) toggle(node, !isOpen(node));
  select(node, false);
});
tree.addEventListener("dblclick", (event) => event.preventDefault());
tree.addEventListener("pointerover", (event) => hover(event.target.closest(".row")));
tree.addEventListener("pointerleave", () => hover(null));

function hover(row) {
  const node = row ? Number(row.id.slice(1)) : -1;
  if (node === hovered) return;
  hovered = node;
  draw();
}

strip.addEventListener("click", (event) => {
  const group = event.target.closest("[data-node]");
  if (group) reveal(Number(group.dataset.node));
});
strip.addEventListener("dblclick", (event) => {
  const group = event.target.closest(".box");
  if (group && isBranch(Number(group.dataset.node))) zoom(Number(group.dataset.node));
});

search.addEventListener("input", applySearch);
search.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !search.value) tree.focus();
  else if (event.key === "Escape") clearSearch();
  else if (event.key === "ArrowDown" || event.key === "Enter") {
    if (hits) active = rows.find((node) => hits[node]) ?? -1;
    tree.focus({ preventScroll: true });
    if (active >= 0) select(active);
  } else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target === search || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  search.focus();
  search.select();
});
panel.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tree.focus({ preventScroll: true });
});

function foldAll(value) {
  (keep ? openFound : open).fill(value);
  refresh();
}
document.getElementById("unfold").addEventListener("click", () => foldAll(1));
document.getElementById("fold").addEventListener("click", () => foldAll(0));

const THEMES = ["system", "light", "dark"];

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  theme.textContent = `Theme: ${name}`;
  try {
    localStorage.setItem("tied-theme", name);
  } catch {
    // A browser may keep nothing for a file; then the choice lasts as long as the page.
  }
}
theme.addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});

function savedTheme() {
  try {
    return localStorage.getItem("tied-theme");
  } catch {
    return null;
  }
}

function print(value) {
  printing = value;
  drawMap();
  draw();
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));

let waiting = false;
function soon(work) {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    work();
  });
}
addEventListener("scroll", () => soon(draw), { passive: true });
addEventListener("resize", () => soon(() => {
  drawMap();
  draw();
}));

setTheme(THEMES.includes(savedTheme()) ? savedTheme() : "system");
makeFilters();
unfoldAtFirst();
drawPanel(-1);
drawMap();
applySearch();
