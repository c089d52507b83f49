// One line in which people zoom. Plotly draws; the server has all points, and sends for each range as
// many as can be seen.

const place = document.getElementById("zoom");
const count = document.getElementById("zoom-count");
const SHAPES = { critical: "diamond", warning: "triangle-up", info: "circle" };

function colour(name) {
  // Plotly computes with colours, so the variable is resolved on an element first.
  const probe = document.createElement("span");
  probe.className = `probe ${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function layout(x, y) {
  const ink = colour("ink"), grid = colour("line");
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 13 },
    margin: { l: 60, r: 16, t: 10, b: 40 }, showlegend: false, hovermode: "x", dragmode: "zoom",
    xaxis: { ...axis, title: { text: "step" }, range: x }, yaxis: { ...axis, title: { text: "" }, range: y, autorange: y === undefined },
  };
}

let marks = [];

function traces(found) {
  marks = found.marks;
  const name = place.dataset.name;
  const finite = found.y.filter((value) => value !== null);
  const low = finite.reduce((a, b) => Math.min(a, b), finite[0] ?? 0);
  const high = finite.reduce((a, b) => Math.max(a, b), finite[0] ?? 1);
  return [
    { x: found.x, y: found.y, type: "scatter", mode: found.x.length < 200 ? "lines+markers" : "lines",
      name, line: { color: colour("series"), width: 1.4 }, marker: { size: 4 }, connectgaps: false },
    { x: found.bad, y: found.bad.map(() => low), type: "scatter", mode: "markers", name: "not finite",
      marker: { symbol: "x", size: 9, color: colour("critical") }, hovertemplate: "not finite<extra></extra>" },
    { x: found.marks.map((mark) => mark.x), y: found.marks.map(() => high), type: "scatter", mode: "markers",
      name: "issue", text: found.marks.map((mark) => mark.text.replaceAll("&", "&amp;").replaceAll("<", "&lt;")),
      hovertemplate: "%{text}<extra></extra>",
      marker: { size: 12, symbol: found.marks.map((mark) => SHAPES[mark.severity]),
        color: found.marks.map((mark) => colour(mark.severity)) } },
  ];
}

async function load(range) {
  const url = new URL(place.dataset.points, location.href);
  url.searchParams.set("groups", String(Math.max(200, Math.round(place.clientWidth / 2))));
  if (range !== undefined) { url.searchParams.set("low", range[0]); url.searchParams.set("high", range[1]); }
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function tell(found, drawn) {
  const [shown, all] = [found.x.length, found.total].map((n) => n.toLocaleString("en"));
  count.textContent = `Shown: ${shown} of ${all} points.`;
  place.dataset.drawn = String(drawn);
}

let asked = 0;
let drawing = false;

async function draw(range) {
  const mine = ++asked;
  const found = await load(range);
  if (mine !== asked) return;
  drawing = true;
  await Plotly.react(place, traces(found), layout(range, undefined), { displayModeBar: false, responsive: true, doubleClick: false });
  drawing = false;
  tell(found, mine);
}

async function begin() {
  const loading = place.querySelector(".loading");
  try {
    const found = await load();
    loading?.remove();
    await Plotly.newPlot(place, traces(found), layout(undefined, undefined), { displayModeBar: false, responsive: true, doubleClick: false });
    // What it measures texts with, outside of the page: nothing for those who listen to it.
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
    tell(found, 0);
  } catch (error) {
    if (loading) loading.textContent = `The plot could not be loaded: ${error.message}`;
    return;
  }
  let range;
  place.on("plotly_relayout", (change) => {
    if (drawing || change["xaxis.range[0]"] === undefined) return;
    range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    draw(range);
  });
  place.on("plotly_doubleclick", () => { range = undefined; draw(undefined); });
  place.on("plotly_click", (event) => {
    const point = event.points[0];
    if (point?.data.name === "issue") location.assign(marks[point.pointNumber].url);
  });
  document.addEventListener("tocsin:theme", () => draw(range));
}

if (place !== null) begin();
