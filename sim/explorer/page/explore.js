// The page of `sim explore`: controls on the left, results on the right. The server checks and runs everything.
// A setting is a text, as in `--set KEY=TEXT`. charts.js has `colour`, `layoutOf` and `config`.
const first = JSON.parse(document.getElementById("first").textContent);
const by = id => document.getElementById(id);
const root = document.documentElement;
const PATIENCE = 300; // milliseconds: a run that takes longer ends when the controls change again
const HEIGHT = { usual: 215, rate: 265 }; // of charts, pixels; the time breakdown is as high as the table beside it
const page = crypto.randomUUID();
let state = readUrl() ?? first.state;
let controls = [], charts = {};
let changes = 0; // number of the last change; an answer to an older one is not drawn
let changedAt = 0, flight = null, timer = 0, urlTimer = 0;

function make(tag, content = {}, ...inner) {
  const { dataset, ...properties } = content;
  const element = Object.assign(document.createElement(tag), properties);
  Object.assign(element.dataset, dataset ?? {});
  element.append(...inner);
  return element;
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error((await response.json()).detail);
  return response;
}

// ---- the state in the address ----
function readUrl() {
  try {
    const read = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    return read && typeof read === "object" ? { ...first.state, ...read } : null;
  } catch { return null; }
}

function saveUrl() {
  clearTimeout(urlTimer); // browsers limit how often a page may change its address
  urlTimer = setTimeout(() => history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state))), 150);
}

// ---- controls ----
async function loadControls(choose) {
  try {
    const answer = await (await post("scenario", { state, choose })).json();
    ({ state, controls } = answer);
    renderControls();
    showError(answer.error);
  } catch (error) { showError({ key: "", text: error.message }); }
}

function renderControls() {
  const groups = {};
  for (const control of controls) (groups[control.group] ??= []).push(renderControl(control));
  by("groups").replaceChildren(...Object.entries(groups).map(([name, rows]) =>
    make("section", { className: "group" }, make("h2", { textContent: name }), ...rows)));
  filterControls();
}

function renderControl(control) {
  const id = "c-" + control.key, value = control.text;
  const row = make("div", { className: "control", dataset: { key: control.key } }, make("label", { htmlFor: id }, ...breakable(control.label)));
  let input;
  if (control.kind === "switch") {
    input = make("input", { id, type: "checkbox", checked: (value || control.default) === "true" });
    input.addEventListener("change", () => set(control, String(input.checked)));
  } else if (control.kind === "choice") {
    input = make("select", { id }, ...optionsOf(control));
    input.value = value;
    input.addEventListener("change", () => set(control, input.value));
    if (isWhole(control) || Math.max(...[...input.options].map(option => option.text.length)) > 12) row.classList.add("long");
  } else {
    input = make("input", { id, type: "text", value, placeholder: control.default || "not set", autocomplete: "off", spellcheck: false });
    if (control.kind === "number") input.inputMode = "decimal";
    else row.classList.add("long");
    input.addEventListener("change", () => set(control, input.value.trim()));
  }
  row.append(input);
  if (control.kind === "combo") {
    input.setAttribute("list", id + "-list");
    row.append(make("datalist", { id: id + "-list" }, ...control.choices.map(value => make("option", { value }))));
  }
  if (control.ticks.length) row.append(slider(control, input));
  row.append(make("p", { className: "help", textContent: control.help }), make("p", { className: "error", role: "alert", hidden: true }));
  row.classList.toggle("changed", control.key in state.settings);
  return row;
}

// A long name breaks after its dots, or else after its underscores.
const breakable = name => name.split(name.includes(".") ? /(?<=\.)/ : /(?<=_)/).flatMap(part => [make("wbr"), part]);

const isWhole = control => first.whole.includes(control.key); // the server changes several settings for it

function optionsOf(control) {
  const usual = make("option", { value: "", textContent: control.default === "" ? "default" : control.default + " (default)" });
  return [...(isWhole(control) ? [] : [usual]), ...control.choices.map(value => make("option", { value, textContent: value || first.file }))];
}

// A slider moves over a list of values; the field beside it takes any value.
function slider(control, input) {
  const range = make("input", { type: "range", min: 0, max: control.ticks.length - 1, step: 1 });
  range.setAttribute("aria-label", control.label);
  const place = () => { range.value = nearest(control.ticks, Number(input.value || control.default)); };
  place();
  input.addEventListener("change", place);
  range.addEventListener("input", () => {
    input.value = String(control.ticks[range.value]);
    set(control, input.value);
  });
  return range;
}

function nearest(ticks, value) {
  let best = 0;
  ticks.forEach((tick, index) => { if (Math.abs(tick - value) < Math.abs(ticks[best] - value)) best = index; });
  return best;
}

async function set(control, text) {
  showError(null);
  if (isWhole(control)) await loadControls({ key: control.key, value: text });
  else if (text === "") {
    delete state.settings[control.key];
    await loadControls();
  } else {
    state.settings[control.key] = text;
    rowOf(control.key)?.classList.add("changed");
  }
  change();
}

const rowOf = key => document.querySelector(`.control[data-key="${CSS.escape(key)}"]`);

function filterControls() {
  const words = by("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const control of controls) {
    const text = `${control.key} ${control.group} ${control.help}`.toLowerCase(), row = rowOf(control.key);
    row.hidden = words.length ? !words.every(word => text.includes(word)) : control.rare && !(control.key in state.settings);
  }
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".control:not([hidden])");
}

// An error appears at the control of its key, or of the section above it.
function showError(error) {
  for (const place of document.querySelectorAll(".error")) place.hidden = true;
  for (const place of document.querySelectorAll(".wrong")) place.classList.remove("wrong");
  by("pictures").classList.toggle("old", Boolean(error));
  if (!error) return;
  let key = error.key, place = null;
  if (key === "subject_to" || key === "metric" || key === "page") {
    place = by("terms-error");
    by(key === "page" ? "replications" : key).classList.add("wrong");
  }
  for (; key && !place; key = key.slice(0, Math.max(0, key.lastIndexOf(".")))) {
    const row = rowOf(key);
    row?.classList.add("wrong");
    if (row) row.hidden = row.closest(".group").hidden = false;
    place = row?.querySelector(".error");
  }
  place ??= by("error");
  place.textContent = error.text;
  place.hidden = false;
}

// ---- runs ----
function change() {
  changes += 1;
  changedAt = performance.now();
  root.dataset.changes = changes;
  showPins();
  saveUrl();
  next();
}

// One answer at a time. A change waits for the picture of the run before it, but not for a slow one.
function next() {
  clearTimeout(timer);
  if (flight && !flight.drawn) {
    const left = PATIENCE - (performance.now() - flight.started);
    if (left > 0) { timer = setTimeout(next, left); return; }
  }
  flight?.controller.abort();
  start();
}

async function start() {
  const mine = { number: changes, changedAt, started: performance.now(), drawn: false, controller: new AbortController() };
  flight = mine;
  by("progress").classList.remove("idle");
  by("progress-text").textContent = "";
  by("part").removeAttribute("value");
  try {
    const response = await post("run", { state, page }, mine.controller.signal);
    for await (const message of lines(response.body)) {
      if (flight !== mine) return;
      await handlers[message.kind](message, mine);
    }
    finish(mine, "");
  } catch (error) {
    if (flight === mine && error.name !== "AbortError") { showError({ key: "page", text: error.message }); finish(mine, ""); }
  }
}

function finish(mine, text) {
  if (flight !== mine) return;
  flight = null;
  by("progress").classList.add("idle");
  by("progress-text").textContent = text;
  root.dataset.done = mine.number;
  if (mine.number !== changes && !text) next();
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

const handlers = {
  applied({ settings }) { // keys that follow from others, for example the seconds of a workload from its rate
    for (const [key, text] of Object.entries(settings)) {
      const input = by("c-" + key);
      if (input && !(key in state.settings) && input !== document.activeElement) input.value = text;
    }
  },
  progress({ part, ended, planned }, mine) {
    if (!mine.drawn) by("pictures").classList.add("old");
    by("part").value = part;
    by("progress-text").textContent = `run ${Math.min(ended + 1, planned)} of ${planned}`;
  },
  error({ key, text }, mine) {
    mine.drawn = true;
    showError({ key, text });
    if (!by("verdict-text").textContent) by("better").textContent = "No result";
    root.dataset.shown = mine.number;
  },
  async picture(message, mine) {
    showError(null);
    showTable(message);
    by("notes").replaceChildren(...message.notes.map(text => make("li", { textContent: text })));
    const isTime = figure => figure.id === "time-breakdown";
    await Promise.all([drawCharts(by("time"), message.charts.filter(isTime)), drawCharts(by("charts"), message.charts.filter(figure => !isTime(figure)))]);
    if (!mine.drawn) {
      mine.drawn = true;
      root.dataset.shown = mine.number;
      performance.measure("picture", { start: mine.changedAt, end: performance.now() });
      if (mine.number !== changes) next();
    }
  },
  verdict({ better, text, limits, pairs }) {
    const heads = { current: "Current is better", baseline: "Baseline is better" };
    by("better").textContent = heads[better] ?? (text ? "No significant difference" : "No baseline: pin one to compare");
    by("verdict-text").textContent = `${text} ${pairs}`;
    by("verdict-limits").textContent = limits;
    by("verdict").className = "card result" + ({ current: " won", baseline: " lost" }[better] ?? "");
  },
  async rates({ charts, caption }) {
    await drawCharts(by("rates"), charts);
    by("rates-caption").textContent = caption;
  },
  done() {},
};

by("stop").addEventListener("click", () => {
  const mine = flight;
  mine?.controller.abort();
  if (mine) finish(mine, "stopped");
});

// ---- results ----
function coloured(element, number) {
  element.style.setProperty("--colour", `var(--${first.colours[number]})`);
  return element;
}

function showTable({ table, columns, requests }) {
  const head = columns.map(number => coloured(make("th", { textContent: first.names[number] }), number));
  const body = table.map(row => {
    const values = row.cells.map(cell => cell.value).filter(value => value !== null);
    const best = row.goal === "min" ? Math.min(...values) : Math.max(...values), differ = Math.max(...values) - Math.min(...values) > first.indifference * Math.abs(best);
    return make("tr", {}, make("th", { textContent: row.metric }), ...row.cells.map(cell => make("td", {
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
  if (showlegend) layout.width = plot.clientWidth; // the table beside it changes its width
  return Plotly.react(plot, colour(figure.data), { ...layout, height, showlegend }, config);
}

function redraw() {
  for (const { plot, figure } of Object.values(charts)) if (plot.isConnected) draw(plot, figure);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);

// ---- pinned scenarios and terms ----
function showPins() {
  by("pins").replaceChildren(...[state, ...state.pins].map((pin, index) => {
    const item = coloured(make("li", {}, make("b", { textContent: first.names[index] }), make("span", { textContent: describe(pin) })), index);
    if (index) {
      item.append(button("use", () => { Object.assign(state, { start: pin.start, settings: { ...pin.settings } }); return loadControls(); }));
      item.append(button("remove", () => { state.pins.splice(index - 1, 1); }));
    }
    return item;
  }));
  by("pin-variant").disabled = state.pins.length === first.names.length - 1 || !state.pins.length;
}

function button(text, action) {
  const made = make("button", { type: "button", textContent: text });
  made.addEventListener("click", async () => { await action(); change(); });
  return made;
}

// The settings of a scenario in short; requests and SLO are those of the controls for all.
function describe(pin) {
  const own = Object.entries(pin.settings).filter(([key]) => !first.shared.includes(key.split(".")[0]));
  const words = own.map(([key, text]) => `${key.split(".").pop()}=${text}`).join(", ");
  return [pin.start || first.file, words].filter(Boolean).join(": ");
}

const pinned = () => ({ start: state.start, settings: { ...state.settings } });
by("pin-baseline").addEventListener("click", () => { state.pins[0] = pinned(); change(); });
by("pin-variant").addEventListener("click", () => { state.pins.push(pinned()); change(); });
by("metric").append(...first.metrics.map(name => make("option", { value: name, textContent: name || "what fits the load" })));
const terms = { // how the text of a field becomes its value
  metric: text => text,
  replications: text => Number.isInteger(Number(text)) ? Number(text) : text,
  subject_to: text => text.replaceAll(/\s*;\s*/g, "\n"),
};
for (const [id, read] of Object.entries(terms)) {
  by(id).addEventListener("change", () => { state[id] = read(by(id).value.trim()); change(); });
}
by("search").addEventListener("input", filterControls);

// ---- copy ----
by("open-copy").addEventListener("click", async () => {
  try {
    const texts = await (await post("copy", { state })).json();
    by("copy-names").replaceChildren(...Object.entries(texts).map(([name, text]) => {
      const choose = make("button", { type: "button", textContent: name, dataset: { name } });
      choose.addEventListener("click", () => {
        for (const other of by("copy-names").children) other.setAttribute("aria-pressed", other === choose);
        by("copy-text").textContent = text;
        by("copy-now").textContent = "Copy to the clipboard";
      });
      return choose;
    }));
    by("copy-names").firstChild.click();
    by("copy").showModal();
  } catch (error) { showError({ key: "", text: error.message }); }
});
by("copy-close").addEventListener("click", () => by("copy").close());
by("copy-now").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(by("copy-text").textContent); by("copy-now").textContent = "Copied"; }
  catch { getSelection().selectAllChildren(by("copy-text")); by("copy-now").textContent = "Press Ctrl+C"; }
});

async function load() {
  by("replications").value = state.replications;
  by("metric").value = state.metric;
  by("subject_to").value = state.subject_to.replaceAll("\n", "; ");
  await loadControls();
  change();
}
addEventListener("hashchange", () => { state = readUrl() ?? state; load(); });
load();
