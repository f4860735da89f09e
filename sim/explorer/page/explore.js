// The page of `sim explore`: controls on the left, results on the right. The server checks and runs everything.
// A setting is a text, as in `--set KEY=TEXT`. results.js shows the results.
const root = document.documentElement;
const PATIENCE = 300; // milliseconds: a run that takes longer ends when the controls change again
const SAME_MOVE = 1000; // milliseconds: changes of one control in a shorter time are undone together
const page = crypto.randomUUID();
let state = readUrl() ?? structuredClone(first.state);
let controls = [], changed = [], labels = [], messages = {}; // messages: the last one of each kind
let changes = 0; // number of the last change; an answer to an older one is not drawn
let changedAt = 0, flight = null, timer = 0, urlTimer = 0;
let past = [], last = "", lastKey = ""; // states before the changes, as JSON; the state now; the control of the last change

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
    return read && typeof read === "object" ? { ...structuredClone(first.state), at_knee: false, ...read } : null;
  } catch { return null; }
}

function saveUrl() {
  clearTimeout(urlTimer); // browsers limit how often a page may change its address
  urlTimer = setTimeout(() => history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state))), 150);
}

// ---- controls ----
async function loadControls(choose) {
  root.dataset.done = root.dataset.shown = ""; // a change follows
  try {
    const answer = await (await post("scenario", { state, choose })).json();
    ({ state, controls, changed } = answer);
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
  row.classList.toggle("changed", changed.includes(control.key) && isChanged(control.key));
  return row;
}

// A long name breaks after its dots, or else after its underscores.
const breakable = name => name.split(name.includes(".") ? /(?<=\.)/ : /(?<=_)/).flatMap(part => [make("wbr"), part]);

const isChanged = key => state.settings[key] !== first.state.settings[key];
const isWhole = control => first.whole.includes(control.key); // the server changes several settings for it

function optionsOf(control) {
  const usual = make("option", { value: "", textContent: control.default === "" ? "default" : control.default + " (default)" });
  const named = value => value || (control.key === "start" ? first.file : `${control.default} (of the profile)`);
  return [...(isWhole(control) ? [] : [usual]), ...control.choices.map(value => make("option", { value, textContent: named(value) }))];
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
    rowOf(control.key)?.classList.toggle("changed", isChanged(control.key));
  }
  change(control.key);
}

const rowOf = key => document.querySelector(`.control[data-key="${CSS.escape(key)}"]`);

// A word finds a control by its key, its label, its group or its help text. A key inside of a section finds the section.
function filterControls() {
  const words = by("search").value.toLowerCase().split(/[\s,;=]+/).filter(Boolean);
  for (const control of controls) {
    const text = `${control.key} ${control.label} ${control.group} ${control.help}`.toLowerCase(), row = rowOf(control.key);
    const finds = word => text.includes(word) || word.startsWith(control.key.toLowerCase() + ".");
    row.hidden = words.length ? !words.every(finds) : control.rare && !(control.key in state.settings);
  }
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".control:not([hidden])");
  by("no-setting").hidden = Boolean(document.querySelector(".control:not([hidden])"));
}

const dim = (ids, isOld) => ids.forEach(id => by(id).classList.toggle("old", isOld));
const RESULTS = ["verdict-lines", "tile-ttft", "tile-goodput", "tile-limit", "pictures"], RATES = ["tile-load", "rates-part"];

// An error appears at the control of its key, or of the section above it.
function showError(error) {
  for (const place of document.querySelectorAll(".error")) place.hidden = true;
  for (const place of document.querySelectorAll(".wrong")) place.classList.remove("wrong");
  if (!error) return;
  dim([...RESULTS, ...RATES], true);
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
function change(key = "") {
  const now = JSON.stringify(state), isMove = key && key === lastKey && performance.now() - changedAt < SAME_MOVE;
  if (last && now !== last && !isMove) past.push(last);
  [last, lastKey] = [now, key];
  showUndo();
  changes += 1;
  changedAt = performance.now();
  root.dataset.changes = changes;
  showPins();
  saveUrl();
  next();
}

function showUndo() {
  by("undo").disabled = !past.length;
  by("reset").disabled = JSON.stringify(state) === JSON.stringify(first.state);
}

function goTo(text) {
  state = JSON.parse(text);
  load();
}
by("undo").addEventListener("click", () => { const before = past.pop(); last = ""; goTo(before); });
by("reset").addEventListener("click", () => goTo(JSON.stringify(first.state)));
by("knee").addEventListener("click", () => { state.at_knee = true; change(); });

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
  messages = {};
  dim([...RESULTS, ...RATES], true);
  by("progress").classList.remove("idle");
  by("progress-text").textContent = "";
  by("part").removeAttribute("value");
  try {
    const response = await post("run", { state, page, change: mine.number }, mine.controller.signal);
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
  labels(message) { ({ labels } = message); showPins(); },
  knee({ key, text, ticks }) { // the rate that the server found is a setting, and no change of the user
    const isFirst = last === JSON.stringify(first.state);
    state.settings[key] = text;
    state.at_knee = false;
    changed.push(key);
    last = JSON.stringify(state);
    if (isFirst) first.state = JSON.parse(last);
    const control = controls.find(control => control.key === key);
    if (control) rowOf(key).replaceWith(renderControl(Object.assign(control, { text, ticks })));
    showUndo();
    saveUrl();
  },
  applied({ settings }) { // keys that follow from others, for example the seconds of a workload from its rate
    for (const [key, text] of Object.entries(settings)) {
      const input = by("c-" + key);
      if (input && !(key in state.settings) && input !== document.activeElement) input.value = text;
    }
  },
  progress({ part, ended, planned }) {
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
    messages.picture = message;
    await results.picture(message);
    dim(RESULTS, false);
    if (!mine.drawn) {
      mine.drawn = true;
      root.dataset.shown = mine.number;
      performance.measure("picture", { start: mine.changedAt, end: performance.now() });
      if (mine.number !== changes) next();
    }
  },
  verdict(message) {
    messages.verdict = message;
    results.verdict(message);
    dim(RESULTS.slice(1), message.better === "refused"); // the simulated numbers of a server that does not start
  },
  async rates(message) {
    messages.rates = message;
    await results.rates(message);
    dim(RATES, messages.verdict?.better === "refused");
  },
  done() {},
};

by("stop").addEventListener("click", () => {
  const mine = flight;
  mine?.controller.abort();
  if (mine) finish(mine, "stopped");
});

// ---- pinned scenarios and terms ----
function showPins() {
  by("pins").replaceChildren(...[state, ...state.pins].map((pin, index) => {
    const item = pinItem(labels[index] ?? "", index);
    if (index) {
      item.append(button("use", () => { Object.assign(state, { start: pin.start, settings: { ...pin.settings } }); return loadControls(); }));
      item.append(button("remove", () => { state.pins.splice(index - 1, 1); labels.splice(index, 1); }));
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

const pinned = () => ({ start: state.start, settings: { ...state.settings } });
by("pin-baseline").addEventListener("click", () => { state.pins[0] = pinned(); change(); });
by("pin-variant").addEventListener("click", () => { state.pins.push(pinned()); change(); });
by("metric").append(...Object.entries({ "": "what fits the load", ...first.metrics }).map(([value, textContent]) => make("option", { value, textContent, title: value })));
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

// ---- save ----
by("save").addEventListener("click", async () => {
  try {
    const texts = await (await post("copy", { state })).json(), date = new Date().toISOString().slice(0, 16).replace("T", " ") + " UTC";
    const { names, colours, indifference } = first, shown = Object.values(messages);
    const content = JSON.stringify({ names, colours, indifference, labels, texts, date, messages: shown }).replaceAll("<", "\\u003c");
    const empty = await (await fetch("saved.html")).text();
    const text = empty.replace(/(id="first">)null(?=<)/, (_, start) => start + content);
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/html" })), download: "explore.html" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) { showError({ key: "", text: error.message }); }
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
