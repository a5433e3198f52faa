// What is selected, in full, and the ways to what it is tied to.

const panel = document.getElementById("panel");
const MOST_LISTED = 50;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else made.setAttribute(key, value);
  }
  if (tag === "button") made.type = "button";
  made.append(...children);
  return made;
}

function way(node) {
  const button = element("button", { class: "way" }, element("bdi", { dir: "ltr", text: shown(nameOf(node)) }));
  button.addEventListener("click", () => reveal(node, true));
  return button;
}

function term(list, name, ...values) {
  list.append(element("dt", { text: name }), element("dd", {}, ...values));
}

function drawPanel(i) {
  panel.replaceChildren();
  panel.classList.toggle("selected", i >= 0);
  panel.scrollTop = 0;
  if (i < 0) return drawWhole();
  const close = element("button", { class: "close", "aria-label": "Close" }, "\u00d7");
  close.addEventListener("click", () => select(-1));
  const title = element("h2", {}, element("bdi", { dir: "ltr", text: shown(nameOf(i), 4000) }));
  const list = element("dl");
  const kind = kindOf(i);
  if (kind) {
    term(list, "Shape", kind[0]);
    term(list, "Type", kind[1]);
  }
  if (isStored(i)) {
    const own = kind[2];
    term(list, "Bytes", `${grouped(own)}, ${percent(own, totalBytes)} of all`);
  }
  if (role[i] === SPAN) term(list, "What", "memory of which names read parts; no name of its own");
  if (isBranch(i)) {
    term(list, "In it", counted(tensors[i] - (role[i] && role[i] !== SPAN ? 1 : 0), "name"));
    term(list, "Parameters", grouped(elements[i]));
    term(list, "Bytes", `${grouped(bytes[i])}, ${percent(bytes[i], totalBytes)} of all`);
  }
  if (data.file.length && role[i] && role[i] !== COMPUTED) {
    term(list, "File", shown(data.files[data.file[i]]));
  }
  panel.append(close, title, list, ...tiesOf(i));
  if (missed[i]) {
    panel.append(element("p", { class: "note", text: "The file has no tensor of this name: a loader that knows no ties misses it." }));
  }
  if (isBranch(i)) panel.append(...tiesWithin(i, end[i]), zoomButton(i));
}

function zoomButton(i) {
  const button = element("button", { text: zoomed === i ? "Draw everything" : "Draw only this branch" });
  button.addEventListener("click", () => {
    zoom(zoomed === i ? -1 : i);
    drawPanel(i);
    panel.querySelector("button:last-child").focus();
  });
  return button;
}

function drawWhole() {
  panel.append(element("h2", { class: "whole", text: "Ties" }));
  if (!links.length) {
    const asked = data.lost === null ? " tied report --discover looks for those that were lost." : "";
    panel.append(element("p", { text: "No ties are recorded." + asked }));
    return;
  }
  panel.append(...tiesWithin(0, N));
}

// What a node reads, and what reads it.
function tiesOf(i) {
  const parts = [];
  for (const link of linksOf.get(i) || []) {
    if (link.to === i) {
      const title = { tie: "Read by", lost: "Its values again", computed: "Computed from it" };
      parts.push(element("h3", { class: link.type, text: title[link.type] }), listed(link, link.from));
    } else {
      const title = { tie: "Reads", lost: "Has the values of", computed: "Computed from" };
      const own = link.from.filter((from) => from.node === i);
      parts.push(element("h3", { class: link.type, text: title[link.type] }));
      const item = element("li", {}, way(link.to));
      if (link.type !== "computed") {
        item.append(element("code", { text: shown(howOf(link, own[0])) }));
      }
      if (link.type === "lost") {
        item.append(element("small", { text: `${own[0].kind}; ${saidBytes(bytes[i])} stored twice. ` +
          "Equal values are no proof that the two were tied." }));
      }
      parts.push(element("ul", { class: link.type }, item));
      const others = link.from.filter((from) => from.node !== i);
      if (others.length && link.type === "tie") {
        parts.push(element("h3", { class: link.type, text: "So do" }), listed(link, others));
      }
    }
  }
  return parts;
}

function listed(link, from) {
  const items = from.slice(0, MOST_LISTED).map((one) => {
    const item = element("li", {}, way(one.node));
    if (link.type !== "computed") item.append(element("code", { text: shown(howOf(link, one)) }));
    return item;
  });
  if (from.length > items.length) {
    items.push(element("li", { text: `and ${grouped(from.length - items.length)} more` }));
  }
  return element("ul", { class: link.type }, ...items);
}

// The ties of which a part is between two nodes; the largest first.
function tiesWithin(low, high) {
  const within = links.filter((link) => members(link).some((node) => node >= low && node < high));
  const parts = [];
  const titles = { tie: "Tied", lost: "Lost ties", computed: "Computed" };
  for (const [type, title] of Object.entries(titles)) {
    const own = within.filter((link) => link.type === type);
    if (!own.length) continue;
    const items = [];
    for (const link of own.slice(0, 12)) {
      for (const from of link.from.slice(0, 4)) {
        items.push(element("li", {}, way(from.node), element("code", { text: shown(howOf(link, from)) })));
      }
      const more = link.from.length - 4;
      if (more > 0) items.push(element("li", { text: `and ${grouped(more)} more of it` }));
    }
    if (own.length > 12) items.push(element("li", { text: `and ${grouped(own.length - 12)} more` }));
    parts.push(element("h3", { class: type, text: `${title} (${grouped(own.length)})` }),
      element("ul", { class: type }, ...items));
  }
  return parts;
}
