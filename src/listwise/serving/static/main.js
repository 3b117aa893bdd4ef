// The page: the present search, the history of searches, and what is shown.

import { fromHash, toHash } from "./address.js";
import * as api from "./api.js";
import { Classes } from "./classes.js";
import { byId, count, sleep } from "./dom.js";
import { Duplicates } from "./duplicates.js";
import { FilterBar, toExpression } from "./filters.js";
import { Grid, nameOf } from "./grid.js";
import { keep, kept } from "./kept.js";
import { LabelDialog } from "./label.js";
import { Marking } from "./marking.js";
import { MOST, QueryMarks, queryName } from "./marks.js";
import { hush, say } from "./notice.js";
import { guardPictures } from "./pictures.js";
import { limited, measure, readPhotos, takeIn } from "./photos.js";
import { QueryPanel } from "./query.js";
import { Viewer } from "./viewer.js";

const PATIENCE = 150; // milliseconds before the page shows that a search is running
const RETRIES = 5; // when the server is busy
const PAGE = 60; // results that are requested together
const SAMPLE = 24;
const SAMPLE_PAGES = 12;
const VIEWS = ["duplicates", "classes"]; // besides the start and a search

let server = null;
let ready = null; // a promise that resolves when the limits of the server are known
let running = new AbortController();
// A visit is a search and the scroll position in its results; the history has its name.
const visits = new Map();
const session = performance.timeOrigin;
// `expand` is null for the default of the index.
let here = { examples: [], chosen: 0, expand: null, refine: false, rerank: false, filters: {}, answer: null };

const panel = new QueryPanel({
  onBox: (box) => {
    const { examples, chosen } = here;
    change({ examples: examples.with(chosen, { ...examples[chosen], box }) });
  },
  onChoose: (chosen) => {
    here.chosen = chosen;
    showQuery();
  },
  onRemove: (number) => go(here.examples.filter((_, i) => i !== number)),
  onSwitch: (name, on) => change({ [name]: name === "expand" && on === expandsByDefault() ? null : on }),
  onStore: store,
});
const filterBar = new FilterBar(byId("filters"), (filters) => change({ filters }));
const viewer = new Viewer({
  onPick: searchFrom,
  onAdd: addExample,
  onRemove: (item) => removeEntries([item]),
  onClosed: (item) => duplicates.focus(item) || currentGrid().focus(item),
  onMark: (item, same, at) => marking.mark([{ ...item, rank: at + 1 }], same),
  markOf: (key) => marking.of(key),
});
const results = new Grid(byId("results"), {
  onPick: searchFrom,
  onView: (at) => viewer.open(results.items, at, here.frames ?? [], server.can_write),
  onAdd: addExample,
  onEnd: nextPage,
  onMark: (items, same) => marking.mark(items.map(ranked), same),
  markOf: (key) => marking.of(key),
});
const ranked = (item) => ({ ...item, rank: results.items.indexOf(item) + 1 });
const marking = new Marking({
  onChange: rankAgain,
  query: markedQuery,
  canSave: () => here.examples.length > 0 && (isEntry(here.examples[0]) ? server.can_mark : server.can_write),
});
new LabelDialog(marking, {
  items: () => results.items,
  query: () => (isEntry(here.examples[0]) ? here.examples[0].key : null),
  most: () => server.limits.results,
  onLabelled: () => refresh().catch(() => {}),
});
const classes = new Classes({ onPick: searchFrom });
const duplicates = new Duplicates({
  onView: (entries, at) => viewer.open(entries, at, [], server.can_write),
  onRemove: removeEntries,
});
const samples = new Grid(byId("samples"), {
  onPick: searchFrom,
  onView: (at) => viewer.open(samples.items, at, [], server.can_write),
});

function currentGrid() {
  return here.examples.length ? results : samples;
}

/* Navigation */

function go(wanted, last = wanted.length - 1) {
  const { examples, problems } = limited(wanted, server.limits.photos);
  const chosen = Math.max(0, Math.min(last, examples.length - 1));
  remember();
  const { expand, refine, rerank, filters } = here;
  arrive({ examples, chosen, expand, refine, rerank, filters });
  history.pushState({ visit: here.name }, "", toHash(here));
  keep(here);
  show();
  if (problems.length) say(problems[0]);
}

function arrive(visit) {
  const name = `${session}/${visits.size}`;
  here = { name, answer: null, frames: [], shown: 0, scroll: 0, ...visit };
  visits.set(here.name, here);
}

function remember() {
  here.scroll = window.scrollY;
  here.shown = results.shown;
}

/** Change the present search: its box or its switches. */
function change(what) {
  here = Object.assign(here, what, { before: here.answer ?? here.before, answer: null });
  history.replaceState({ visit: here.name }, "", toHash(here));
  keep(here);
  showMarks();
  showQuery();
  search();
}

/** Order the results again after a mark. */
function rankAgain() {
  results.showMarks();
  Object.assign(here, { before: here.answer ?? here.before, answer: null });
  showQuery();
  search({ again: true });
}

async function returnTo(state) {
  remember();
  running.abort();
  running = new AbortController(); // for the next pages of a search that is shown again
  viewer.leave();
  const known = visits.get(state?.visit);
  if (!known) return readAddress(state?.visit);
  here = known;
  show();
}

async function readAddress(name) {
  api.takeToken();
  const { hash } = location;
  const { entries, own, expand, refine, rerank, filters } = fromHash(hash);
  let examples = own ? await kept(name) : [];
  let problem =
    own && !examples.length && "This address does not contain your own photos: choose them again.";
  try {
    const found = await Promise.all(entries.map(({ key }) => api.entry(key)));
    if (!own) examples = found.map((entry, i) => ({ ...ofEntry(entry), box: entries[i].box }));
  } catch (error) {
    problem = error.status === 404 ? "That photo is not in the index." : error.message;
  }
  if (location.hash !== hash) return; // the user has opened another search meanwhile
  const view = VIEWS.includes(hash.slice(2)) ? hash.slice(2) : "";
  arrive({ examples, chosen: 0, expand, refine, rerank, filters, view });
  history.replaceState({ visit: here.name }, "", view ? hash : toHash(here));
  keep(here);
  show();
  if (problem) say(problem);
}

function ofEntry(entry) {
  const { key, width, height } = entry;
  const pictures = { url: api.photo(key), preview: api.thumbnail(key) };
  return { name: nameOf(entry), key, file: null, ...pictures, width, height, box: null };
}

/** Whether an example is a whole entry of the index. */
const isEntry = ({ key, box }) => Boolean(key && !box);

function searchFrom(entry) {
  go([ofEntry(entry)]);
}

function addExample(entry) {
  if (here.examples.some(({ key, box }) => key === entry.key && !box)) {
    say(`${nameOf(entry)} is already an example.`, { kind: "news" });
  } else if (here.examples.length === server.limits.photos) {
    say(`A search can have ${count(server.limits.photos, "example")} at most.`, { kind: "news" });
  } else {
    go([...here.examples, ofEntry(entry)]);
  }
}

async function takeFiles(files, adding) {
  try {
    await ready;
  } catch {
    return; // the page shows the error already
  }
  const { examples, problems } = await readPhotos(files, server.limits, server.max_side);
  const before = adding ? here.examples : [];
  if (examples.length) go([...before, ...examples], before.length);
  if (problems.length) {
    const others = count(problems.length - 1, "more file");
    say(problems[0] + (problems.length > 1 ? ` (${others} skipped.)` : ""));
  }
}

/* Showing */

function show() {
  hush();
  const searching = here.examples.length > 0;
  const view = searching ? "search" : here.view || "start";
  duplicates.close();
  classes.close();
  for (const name of ["start", "search", ...VIEWS]) byId(name).hidden = name !== view;
  document.title = searching ? `${here.examples[here.chosen].name} · Listwise` : "Listwise";
  if (!searching) {
    running.abort();
    atWork(false);
    if (view === "start" && !samples.items.length) showSamples();
    if (view === "duplicates") duplicates.open(server.can_write);
    if (view === "classes") classes.open(server.can_mark, server.limits.results);
    if (here.view) document.title = `${byId(`${view}-head`).textContent} · Listwise`;
  } else {
    showMarks();
    showQuery();
    if (here.answer) {
      atWork(false);
      showAnswer();
    } else {
      search();
    }
  }
  window.scrollTo({ top: here.scroll, behavior: "instant" });
}

/** Whether the index expands the present query unless the user chooses otherwise. */
function expandsByDefault() {
  return server.expands && !here.refine && !here.marks?.size;
}

function showQuery() {
  const expand = here.expand ?? expandsByDefault();
  panel.show({ ...here, expand }, server.limits, server.can_write);
  filterBar.show(here.filters);
}

/** The marks of the present query. */
function showMarks() {
  const name = queryName(here.examples);
  if (here.marks?.name !== name) here.marks = new QueryMarks(name, here.examples[0]);
  marking.open(here.marks);
}

function showAnswer(answer = here.answer, again = false) {
  showSummary(answer);
  const { results: found } = answer;
  byId("nothing").hidden = found.length > 0;
  byId("nothing").textContent = Object.keys(here.filters).length
    ? "No results: no other photo matches the filters."
    : "No results: the index has no other photos.";
  if (again) results.reorder(found, here.shown || undefined);
  else results.show(found, here.shown || undefined);
}

function showSummary(answer = here.answer) {
  const { results: found, milliseconds, expanded, refined, reranked, verified } = answer;
  const filtered = Object.keys(here.filters).length > 0;
  const complete = !answer.more && found.length < server.limits.results;
  const total = filtered ? (complete ? found.length : answer.matching) : server.entries;
  const shown = total > found.length ? `${found.length.toLocaleString("en")} of ` : "";
  const photos = count(server.entries, "photo");
  const seconds = milliseconds / 1000;
  const parts = [
    found.length && shown + (filtered ? `${count(total, "match", "matches")}, ${photos}` : count(total, "photo")),
    found.length && (seconds < 1 ? `${Math.round(milliseconds)} ms` : `${seconds.toFixed(1)} s`),
    expanded && "query expanded",
    refined && "re-ranked by neighbors",
    reranked && `re-ranked by matched points (${count(verified, "photo")} compared)`,
    found.length && answer.pending && "re-ranking …",
    found.length && here.rerank && !reranked && !answer.pending && "not re-ranked: the server was too busy",
  ];
  byId("summary").textContent = parts.filter(Boolean).join(" · ");
}

function showServer() {
  byId("about").textContent = `${server.name} · ${count(server.entries, "photo")}`;
}

async function showSamples() {
  const total = server.entries;
  byId("empty").hidden = total > 0;
  byId("sample-head").hidden = total === 0;
  byId("others").hidden = total <= SAMPLE;
  try {
    const all = total <= SAMPLE;
    samples.show(all ? (await api.entries(0, SAMPLE)).entries : await someEntries(total));
  } catch (error) {
    say(error.message, { action: { label: "Try again", run: () => location.reload() } });
  }
}

/** Entries from the whole index: neighbors are often similar. */
async function someEntries(total) {
  const stride = total / SAMPLE_PAGES;
  const each = Math.ceil(SAMPLE / SAMPLE_PAGES);
  const starts = Array.from({ length: SAMPLE_PAGES }, (_, page) =>
    Math.floor(page * stride + Math.random() * Math.max(0, stride - each)),
  );
  const pages = await Promise.all(starts.map((start) => api.entries(start, each)));
  const found = new Map(pages.flatMap(({ entries }) => entries).map((entry) => [entry.key, entry]));
  return [...found.values()].sort(() => Math.random() - 0.5);
}

function atWork(on) {
  byId("results").setAttribute("aria-busy", String(on));
  if (on) return;
  busy(false);
  reranking(false);
}

function reranking(on) {
  byId("found").classList.toggle("reranking", on);
}

function busy(on) {
  byId("found").classList.toggle("busy", on);
  if (on) byId("summary").textContent = "Searching …";
}

/* Searching */

/** Search; `again` after a mark, with as many results as before. */
async function search({ again = false } = {}) {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const visit = here;
  hush();
  atWork(true);
  const late = setTimeout(() => busy(true), PATIENCE);
  try {
    const marksLoaded = loadMarks(visit, signal);
    const { query, frames } = await toQuery(visit, signal);
    if (again) query.k = Math.min(server.limits.results, Math.max(PAGE, results.items.length));
    const shown = again ? results.shown : 0;
    if (query.rerank) {
      // The results of the descriptors at once; matching points takes longer.
      const first = await searchWithRetries({ ...query, rerank: false }, signal);
      if (signal.aborted) return;
      clearTimeout(late);
      busy(false);
      Object.assign(visit, { before: first, frames, shown });
      showAnswer({ ...first, pending: true }, again);
      reranking(true);
    }
    const answer = await searchWithRetries(query, signal);
    if (signal.aborted) return;
    answer.next = query.k;
    Object.assign(visit, { answer, frames, query: { ...query, k: Math.min(query.k, PAGE) }, shown });
    clearTimeout(late);
    busy(false);
    reranking(false);
    showAnswer(answer, again);
    await marksLoaded; // stored marks order the results again, in another search
    if (!signal.aborted) atWork(false);
  } catch (error) {
    if (signal.aborted) return;
    if (error.status === 404) {
      const dropped = await dropMissing(visit.marks);
      if (signal.aborted) return;
      if (dropped) return search({ again });
    }
    atWork(false);
    keepResults(visit);
    const retry = { action: { label: "Try again", run: () => search({ again }) } };
    say(error.message, [0, 401, 429, 503, 504].includes(error.status) ? retry : {});
  } finally {
    clearTimeout(late);
  }
}

/** After an error: the results before the last change stay, those of another query do not. */
function keepResults(visit) {
  byId("nothing").hidden = true;
  if (visit.before) {
    showAnswer(visit.before, true);
    byId("summary").textContent += " · before the last change";
  } else {
    byId("summary").textContent = "";
    results.show([]);
  }
}

/** Request the next results when the user is near the end of those that are shown. */
async function nextPage() {
  const visit = here;
  const { answer, query } = visit;
  if (!answer?.more || visit.loading) return;
  visit.loading = true;
  const { signal } = running;
  try {
    const next = await searchWithRetries({ ...query, start: answer.next ?? PAGE }, signal);
    answer.next = (answer.next ?? PAGE) + PAGE;
    answer.more = next.more;
    const known = new Set(answer.results.map(({ key }) => key));
    const added = next.results.filter(({ key }) => !known.has(key));
    if (here === visit && here.answer === answer) {
      results.extend(added);
      answer.results = results.items;
      showSummary();
    } else {
      answer.results.push(...added);
    }
  } catch (error) {
    if (!signal.aborted) say(error.message, { action: { label: "Try again", run: nextPage } });
  } finally {
    visit.loading = false;
  }
}

async function searchWithRetries(query, signal) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await api.search(query, signal);
    } catch (error) {
      if (![429, 503].includes(error.status) || tries === RETRIES) throw error;
      say(`The server is busy; trying again in ${count(error.wait, "second")} …`, { kind: "news" });
      await sleep(1000 * error.wait, signal);
      hush();
    }
  }
}

/** The query of a visit for the server, and its examples in the same order: photos, then entries. */
async function toQuery({ examples, expand, refine, rerank, filters, marks }, signal) {
  const photos = [];
  const byKey = [];
  for (const example of examples) {
    if (isEntry(example)) byKey.push(example);
    else photos.push(example.file ? example : await copyOf(example, signal));
  }
  const k = Math.min(server.limits.results, PAGE);
  const where = toExpression(filters);
  const marked = { same: marks.keys(true, MOST), different: marks.keys(false, MOST) };
  const keys = byKey.map(({ key }) => key);
  const query = { photos, keys, k, expand, refine, rerank, where, ...marked };
  return { query, frames: [...photos, ...byKey] };
}

/** Load the marks that are stored for an entry, once, and order the results by them. */
async function loadMarks(visit, signal) {
  const { examples, marks } = visit;
  if (marks.loaded || examples.length > 1 || !isEntry(examples[0])) return;
  try {
    const { marks: stored } = await api.marksOf(examples[0].key, Math.min(MOST, server.limits.results), signal);
    const state = () => [true, false].map((same) => marks.keys(same).sort().join()).join(" ");
    const before = state();
    marks.load(stored);
    if (here !== visit) return;
    marking.show();
    if (before !== state()) rankAgain();
  } catch {
    // The search works without them.
  }
}

/** Forget marks of entries that are no longer in the index; whether there were some. */
async function dropMissing(marks) {
  const keys = [...marks.marks.keys()];
  const found = await Promise.allSettled(keys.map((key) => api.entry(key)));
  const gone = keys.filter((_, i) => found[i].reason?.status === 404);
  marks.forget(gone);
  marking.show();
  return gone.length > 0;
}

/** What the server gets as the query of marks, which belong to the first example of a search. */
async function markedQuery(example) {
  return example.key && example.box ? copyOf(example) : example;
}

/** An entry with a box is sent to the server as a photo. */
async function copyOf(example, signal) {
  const file = await api.blob(api.photo(example.key), signal);
  const url = URL.createObjectURL(file);
  const size = await measure(url);
  const scale = [size.width / example.width, size.height / example.height];
  const box = example.box.map((edge, i) => Math.round(edge * scale[i % 2]));
  return { ...example, ...size, file, url, box };
}

/* Changing the index */

async function store() {
  const own = here.examples.filter(({ file }) => file).map(({ file, original }) => original ?? file);
  const button = byId("store");
  button.disabled = true;
  try {
    const { added, unchanged, errors } = await api.add(own, byId("store-exif").checked);
    const parts = [];
    if (added.length) parts.push(`Added ${count(added.length, "photo")}.`);
    if (unchanged.length) parts.push(`${count(unchanged.length, "photo")} already in the index.`);
    say([...parts, ...errors].join(" "), { kind: errors.length ? "error" : "news" });
    await refresh();
  } catch (error) {
    say(error.message);
  } finally {
    button.disabled = false;
  }
}

async function removeEntries(items) {
  const removed = [];
  try {
    for (const item of items) {
      await api.remove(item.key);
      removed.push(item);
      forget(item.key);
    }
  } catch (error) {
    say(error.message);
  }
  if (!removed.length) return;
  marking.show();
  const gone = removed.length === 1 ? "is no longer" : "are no longer";
  const undo = { label: "Undo", run: () => restoreEntries(removed) };
  if (removed.length === items.length) {
    say(`${removed.map(nameOf).join(", ")} ${gone} in the index.`, { kind: "news", action: undo });
  }
  // The entries are removed, whether or not the server can describe itself now.
  await refresh().catch(() => {});
}

/** Leave an entry that was removed out of everything that is shown. */
function forget(key) {
  for (const visit of visits.values()) {
    const { answer } = visit;
    visit.marks?.forget([key]);
    if (!answer) continue;
    const left = answer.results.filter((result) => result.key !== key);
    // The results after it move up, so the next page starts earlier.
    if (left.length < answer.results.length) answer.next = (answer.next ?? PAGE) - 1;
    answer.results = left;
  }
  for (const grid of [results, samples]) grid.drop(key);
  duplicates.drop(key);
}

async function restoreEntries(items) {
  const restored = [];
  let failure;
  // The server keeps the last removals.
  for (const item of [...items].reverse()) {
    try {
      await api.restore(item.key);
      restored.push(item);
    } catch (error) {
      failure = error;
    }
  }
  for (const visit of visits.values()) visit.answer = null; // they are searched again
  await refresh().catch(() => {});
  if (!here.examples.length && !here.view) showSamples();
  show();
  if (failure) say(failure.message);
  else say(`${restored.map(nameOf).join(", ")}: in the index again.`, { kind: "news" });
}

async function refresh() {
  server = await api.info();
  showServer();
  // The page works without the filters, and does not wait for them.
  api.facets().then(
    ({ facets }) => {
      filterBar.set(facets);
      if (here.examples.length) filterBar.show(here.filters);
    },
    () => {},
  );
}

/* Events */

function askForToken(wrong) {
  const dialog = byId("token");
  byId("token-wrong").hidden = !wrong;
  byId("token-value").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener(
      "close",
      () => done(dialog.returnValue === "given" ? byId("token-value").value.trim() : null),
      { once: true },
    );
  });
}

function listenToTheme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const { dataset } = document.documentElement;
  const dark = () => (dataset.theme ? dataset.theme === "dark" : system.matches);
  const update = () => button.setAttribute("aria-pressed", String(dark()));
  button.addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    dataset.theme = next;
    localStorage.setItem("listwise-theme", next);
    update();
  });
  system.addEventListener("change", update);
  update();
}

function listenToFiles() {
  for (const [id, adding] of [["files", false], ["more-files", true]]) {
    byId(id).addEventListener("change", ({ target }) => {
      const files = [...target.files];
      target.value = "";
      if (files.length) takeFiles(files, adding);
    });
  }
  for (const id of ["choose", "new"]) {
    byId(id).addEventListener("click", () => byId("files").click());
  }
  takeIn(byId("veil"), byId("drop-add"), takeFiles, say);
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input:not([type=checkbox]), select"); // letters choose an option
    if (typing || document.querySelector("dialog[open]")) return;
    if (event.key === "?") byId("help").showModal();
    const { key, ctrlKey, metaKey } = event;
    const undoing = ctrlKey || metaKey ? key === "z" : key === "u" && !event.altKey;
    if (undoing && !byId("search").hidden) marking.undo();
  });
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  byId("skip").addEventListener("click", () => currentGrid().focus(currentGrid().items[0]));
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
  }
}

async function connect() {
  await refresh();
  guardPictures(server.token_needed);
  window.addEventListener("popstate", ({ state }) => returnTo(state));
  await returnTo(history.state);
}

async function begin() {
  api.onTokenNeeded(askForToken);
  api.takeToken();
  listenToTheme();
  listenToKeys();
  listenToFiles();
  history.scrollRestoration = "manual";
  byId("notice-close").addEventListener("click", hush);
  byId("others").addEventListener("click", showSamples);
  ready = connect();
  try {
    await ready;
  } catch (error) {
    say(error.message, { action: { label: "Try again", run: () => location.reload() } });
  }
}

begin();
