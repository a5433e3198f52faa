// The lines between rows that read one storage: which there are, and where they run.

const LANE = 9; // pixels between lines that run beside one another
const MOST_LANES = 6;
const MOST_DRAWN = 300;
let runs = []; // {type, to: row, from: rows, low, high, lane, count, links}
let lanes = 0;

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Ties between the same rows are one line; so folded branches have one, however much is in them.
function listRuns() {
  const found = new Map();
  for (const link of links) {
    const to = rowOf[link.to];
    if (to < 0) continue;
    const from = new Set();
    for (const member of link.from) if (rowOf[member.node] >= 0) from.add(rowOf[member.node]);
    const ends = [...from].filter((row) => row !== to).sort((a, b) => a - b);
    if (!ends.length) continue;
    const key = [link.type, to, ...ends].join();
    const run = found.get(key);
    if (run) {
      run.count++;
      run.links.push(link);
    } else {
      const low = Math.min(to, ends[0]);
      const high = Math.max(to, ends[ends.length - 1]);
      found.set(key, { type: link.type, to, from: ends, low, high, lane: 0, count: 1, links: [link] });
    }
  }
  runs = [...found.values()].sort((a, b) => a.high - a.low - (b.high - b.low) || a.low - b.low);
  chooseLanes();
}

// Short lines run next to the names; where there is no lane left, lines share the last one.
function chooseLanes() {
  const taken = [];
  lanes = 0;
  const most = innerWidth < 760 ? 2 : MOST_LANES;
  for (const run of runs) {
    let lane = 0;
    while (lane < most - 1 && overlaps(taken[lane], run)) lane++;
    (taken[lane] ||= []).push(run);
    run.lane = lane;
    lanes = Math.max(lanes, lane + 1);
  }
}

function overlaps(others, run) {
  if (!others) return false;
  if (others.length > 200) return true;
  return others.some((other) => other.low <= run.high && run.low <= other.high);
}

// Draws the lines that are to be seen between two rows.
function drawRuns(host, first, last, height, isMarked) {
  const right = gutterWidth() - 5;
  const top = first * height;
  const seen = runs.filter((run) => run.low <= last && run.high >= first);
  const marked = seen.filter(isMarked);
  const others = seen.filter((run) => !isMarked(run));
  const ends = others.filter((run) => [run.to, ...run.from].some((row) => row >= first && row <= last));
  const passing = new Map(others.map((run) => [run.type + run.lane, run])); // one looks as all do
  const drawn = [...new Set([...passing.values(), ...ends.slice(0, MOST_DRAWN)]), ...marked];
  const paths = drawn.map((run) => {
    const x = right - 6 - LANE * run.lane;
    const y = (row) => Math.max(-40, Math.min((last - first + 2) * height, (row + 0.5) * height - top));
    let path = `M${x} ${y(run.low) + 4}V${y(run.high) - 4}`;
    const ends = [run.to, ...run.from].filter((row) => row >= first - 1 && row <= last + 1);
    for (const row of ends) {
      const bend = row === run.low ? 4 : row === run.high ? -4 : 0;
      path += bend
        ? `M${x} ${y(row) + bend}Q${x} ${y(row)} ${x + 4} ${y(row)}H${right}`
        : `M${x} ${y(row)}H${right}`;
    }
    const dots = ends.map((row) =>
      svg("circle", { cx: right, cy: y(row), r: 2.75, class: row === run.to ? "source" : "reader" }));
    const mark = isMarked(run) ? " on" : marked.length ? " off" : "";
    return svg("g", { class: run.type + mark }, svg("path", { d: path }), ...dots);
  });
  host.setAttribute("width", gutterWidth());
  host.setAttribute("height", (last - first + 1) * height);
  host.style.top = top + "px";
  host.replaceChildren(...paths);
}

const gutterWidth = () => (lanes ? 16 + LANE * lanes : 8);
