// The results of a page of `sim explore`, from the messages of its server. A saved page has this script too.
// charts.js has `colour`, `layoutOf` and `config`.
const first = JSON.parse(document.getElementById("first").textContent);
const by = id => document.getElementById(id);
const HEIGHT = { usual: 215, rate: 265 }; // of charts, pixels; the time breakdown is as high as the table beside it
const HEADS = { current: "Current is better", baseline: "Baseline is better", same: "The same as the baseline", none: "No difference", refused: "The engine does not start with these settings" };
const charts = {}; // drawn ones, by id

function make(tag, content = {}, ...inner) {
  const { dataset, ...properties } = content;
  const element = Object.assign(document.createElement(tag), properties);
  Object.assign(element.dataset, dataset ?? {});
  element.append(...inner);
  return element;
}

function coloured(element, number) {
  element.style.setProperty("--colour", `var(--${first.colours[number]})`);
  return element;
}

const results = { // by the kind of the message
  async picture(message) {
    showTable(message);
    for (const [name, tile] of Object.entries(message.tiles)) showTile(name, tile, message.columns);
    by("notes").replaceChildren(...message.notes.map(text => make("li", { textContent: text })));
    const isTime = figure => figure.id === "time-breakdown";
    await Promise.all([drawCharts(by("time"), message.charts.filter(isTime)), drawCharts(by("charts"), message.charts.filter(figure => !isTime(figure)))]);
  },
  verdict({ better, text, limits, pairs, tiles, columns }) {
    for (const [name, tile] of Object.entries(tiles)) showTile(name, tile, columns);
    by("better").textContent = HEADS[better] ?? (text ? "No significant difference" : "No baseline: pin one to compare");
    by("verdict-text").textContent = `${text} ${pairs}`;
    by("verdict-limits").textContent = limits;
    by("verdict").className = "card result" + ({ current: " won", baseline: " lost", refused: " refused" }[better] ?? "");
  },
  async rates({ charts, caption, loads }) {
    const texts = loads.length ? loads.map(load => load.text) : ["–"];
    showTile("load", { texts, detail: loads[0]?.detail ?? caption }, loads.map((_, index) => index));
    by("rates-caption").textContent = caption;
    await drawCharts(by("rates"), charts);
  },
};

// The value of the current scenario, and that of the baseline if it is another one.
function showTile(name, { title, key, texts, detail }, columns) {
  const tile = by("tile-" + name), other = columns.indexOf(1);
  if (title) tile.querySelector("h2").textContent = title;
  if (key) tile.title = key;
  tile.querySelector(".value").textContent = texts[0];
  const lines = [other > 0 && texts[other] !== texts[0] ? `baseline: ${texts[other]}` : "", detail];
  tile.querySelector(".soft").replaceChildren(...lines.filter(Boolean).map(text => make("span", { textContent: text })));
}

function showTable({ table, columns, requests }) {
  const head = columns.map(number => coloured(make("th", { textContent: first.names[number] }), number));
  const body = table.map(row => {
    const values = row.cells.map(cell => cell.value).filter(value => value !== null);
    const best = row.goal === "min" ? Math.min(...values) : Math.max(...values), differ = Math.max(...values) - Math.min(...values) > first.indifference * Math.abs(best);
    return make("tr", {}, make("th", { textContent: row.name, title: row.metric }), ...row.cells.map(cell => make("td", {
      textContent: cell.text, className: differ && cell.value === best ? "best" : "", dataset: { metric: row.metric, value: cell.value },
    })));
  });
  by("metrics").replaceChildren(make("thead", {}, make("tr", {}, make("th", { textContent: `${requests.toLocaleString("en")} requests, one run` }), ...head)), make("tbody", {}, ...body));
}

function drawCharts(place, figures) {
  const ids = figures.map(figure => figure.id);
  for (const old of [...place.children]) if (!ids.includes(old.dataset.id)) old.remove();
  return Promise.all(figures.map(figure => {
    let plot = place.querySelector(`[data-id="${CSS.escape(figure.id)}"] .plot`);
    if (!plot) {
      plot = make("div", { className: "plot" });
      place.append(make("figure", { dataset: { id: figure.id } }, make("h3", { textContent: figure.title }), plot));
    }
    charts[figure.id] = { plot, figure };
    return draw(plot, figure);
  }));
}

function draw(plot, figure) {
  const showlegend = figure.id === "time-breakdown";
  const beside = Math.max(HEIGHT.usual, by("metrics").offsetHeight - 38);
  const height = showlegend ? beside : HEIGHT[figure.id.split("-")[0]] ?? HEIGHT.usual;
  const layout = layoutOf(figure); // fixed margins and few ticks: a chart takes Plotly 20 ms instead of 27
  Object.assign(layout.xaxis, { automargin: false, nticks: 5 });
  Object.assign(layout.yaxis, { automargin: false, nticks: 4 });
  Object.assign(layout.margin, { l: showlegend ? 72 : 60, r: 12, b: 42, t: Math.max(10, layout.margin.t) });
  if (figure.id.startsWith("rate-")) layout.yaxis.title = { ...layout.yaxis.title, font: { size: 11 } }; // a long title
  if (showlegend) layout.width = plot.clientWidth; // the table beside it changes its width
  return Plotly.react(plot, colour(figure.data), { ...layout, height, showlegend }, config);
}

function redraw() {
  for (const { plot, figure } of Object.values(charts)) if (plot.isConnected) draw(plot, figure);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);

// A pinned scenario, and what the user changed in it.
const pinItem = (label, number) => coloured(make("li", {}, make("b", { textContent: first.names[number] }), make("span", { textContent: label })), number);

// Show what a page has saved: its last messages, its labels and its texts to copy.
function showSaved() {
  by("saved-at").textContent = `Saved by sim explore on ${first.date}. It needs neither the server nor a network.`;
  by("pins").replaceChildren(...first.labels.map(pinItem));
  by("texts").replaceChildren(...Object.entries(first.texts).map(([name, text]) =>
    make("details", { open: name === "command" }, make("summary", { textContent: name }), make("pre", { textContent: text }))));
  for (const message of first.messages) results[message.kind](message);
}
