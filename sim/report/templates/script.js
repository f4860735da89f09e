// Charts, tables and the links between them.
const { names, charts: figures } = JSON.parse(document.getElementById("figures").textContent);
for (const trace of Object.values(figures).flatMap(figure => figure.data)) {
  if (trace.meta === "named") trace.hovertext = trace.hovertext.map((text, i) => names[trace.customdata[i][0]] + text);
}
const plots = [...document.querySelectorAll(".plot[data-chart]")];

// The last trace of a chart rings the marked configuration.
const ring = {
  type: "scatter", mode: "markers", name: "marked", x: [], y: [], showlegend: false, hoverinfo: "skip",
  marker: { symbol: "circle-open", size: 20, color: "@ink", line: { width: 2.5, color: "@ink" } },
};

function draw(plot) {
  const figure = figures[plot.dataset.chart];
  const linked = figure.data.some(trace => trace.customdata);
  const layout = layoutOf(figure);
  plot.style.height = layout.height + "px"; // when the window changes its size, Plotly takes the height from here
  return Plotly.react(plot, colour(linked ? [...figure.data, ring] : figure.data), layout, config);
}

// Mark a configuration in every chart and table; the same one again, or null, removes the mark.
let marked = null;
function mark(number, scroll) {
  marked = number === marked ? null : number;
  for (const row of document.querySelectorAll("[data-config]")) {
    const is = marked !== null && Number(row.dataset.config) === marked;
    row.classList.toggle("marked", is);
    row.querySelector(".mark")?.setAttribute("aria-pressed", is);
    if (is && scroll && row.matches("tr")) {
      if (row.hidden) clearFilter(row.closest("table"));
      row.scrollIntoView({ block: "center", behavior: "auto" });
    }
  }
  for (const plot of plots) ringPoints(plot);
}

function ringPoints(plot) {
  const { data } = figures[plot.dataset.chart], x = [], y = [];
  if (!data.some(trace => trace.customdata)) return;
  for (const trace of data) {
    trace.customdata?.forEach((numbers, index) => {
      if (numbers.includes(marked)) { x.push(trace.x[index]); y.push(trace.y[index]); }
    });
  }
  Plotly.restyle(plot, { x: [x], y: [y] }, [data.length]);
}

// Charts of one group keep the same range on their y axes.
function shareZoom(plot, change) {
  const group = figures[plot.dataset.chart].group;
  if (!group || plot.dataset.following) return;
  const keys = Object.keys(change).filter(key => key.startsWith("yaxis."));
  if (!keys.length) return;
  const same = Object.fromEntries(keys.map(key => [key, change[key]]));
  for (const other of plots) {
    if (other === plot || figures[other.dataset.chart].group !== group) continue;
    other.dataset.following = "yes";
    Plotly.relayout(other, same).then(() => delete other.dataset.following);
  }
}

// Sort by a column: numbers by value, other cells as text. A second click reverses the order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    const key = row => { const cell = row.cells[column]; return cell.dataset.v ?? cell.textContent; };
    const compare = (a, b) => {
      const x = key(a), y = key(b), p = Number(x), q = Number(y);
      if (x === "" || y === "") return (x === "") - (y === "");
      return way * (isNaN(p) || isNaN(q) ? x.localeCompare(y) : p - q);
    };
    body.append(...[...body.rows].sort(compare));
  }));
}

document.addEventListener("click", event => {
  const row = event.target.closest("[data-config]");
  if (row) mark(Number(row.dataset.config), false);
});

// A filter has words, which a row must contain, and terms such as decode_batch=32 or makespan<800 about one column.
function readTerm(text, heads) {
  const term = /^([^<>=]+)(<=|>=|=|<|>)(.*)$/.exec(text);
  if (!term) return { test: row => row.textContent.toLowerCase().includes(text) };
  const [, name, sign, value] = term;
  const column = heads.findIndex(head => [head.dataset.key, head.dataset.key.split(".").pop()].includes(name));
  if (column < 0) return { unknown: name, test: () => false };
  return { test: row => compareCell(row.cells[column], sign, value) };
}

function compareCell(cell, sign, value) {
  const text = cell.textContent.trim().toLowerCase(), number = Number(cell.dataset.v ?? text), wanted = Number(value);
  const numbers = value !== "" && text !== "" && !isNaN(number) && !isNaN(wanted);
  if (sign === "=") return text === value || (numbers && number === wanted);
  if (!numbers) return false;
  return { "<": number < wanted, ">": number > wanted, "<=": number <= wanted, ">=": number >= wanted }[sign];
}

function applyFilter(input) {
  const table = document.getElementById(input.dataset.table), heads = [...table.tHead.rows[0].cells];
  const words = input.value.toLowerCase().match(/(?:[^\s"]|"[^"]*")+/g) ?? [];
  const terms = words.map(word => readTerm(word.replaceAll('"', ""), heads));
  let count = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !terms.every(term => term.test(row));
    count += !row.hidden;
  }
  const unknown = terms.find(term => term.unknown)?.unknown;
  const known = heads.map(head => head.dataset.key.split(".").pop()).filter(Boolean).join(", ");
  const note = unknown ? `: no column ${unknown}; columns: ${known}` : "";
  document.getElementById(input.dataset.table + "-shown").textContent = count + " shown" + note;
}

// Without access to the clipboard, select the text.
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.textContent = "Selected: copy it now";
    }
  });
}

function clearFilter(table) {
  const input = document.querySelector(`.filter[data-table="${table.id}"]`);
  if (input) { input.value = ""; applyFilter(input); }
}

for (const input of document.querySelectorAll(".filter")) input.addEventListener("input", () => applyFilter(input));

Promise.all(plots.map(async plot => {
  await draw(plot);
  plot.on("plotly_click", event => {
    const point = event.points.find(point => point.data.customdata);
    if (point) mark(point.customdata[0], true);
  });
  plot.on("plotly_relayout", change => shareZoom(plot, change));
})).then(() => { document.documentElement.dataset.ready = "yes"; });

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(plot => draw(plot).then(() => ringPoints(plot))));
