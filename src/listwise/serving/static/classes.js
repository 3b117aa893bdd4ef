// Classes and their progress, pairs to decide on, and marks that contradict each other.

import * as api from "./api.js";
import { byId, count, make, replaceItems } from "./dom.js";
import { nameOf } from "./grid.js";
import { when } from "./marking.js";
import { say } from "./notice.js";
import { askName, knownName } from "./person.js";
import { setLazily, setPicture } from "./pictures.js";

const PAIRS = 20; // suggestions that are requested together
const PHOTOS = 5; // of a class
const PAGE = 60; // classes
const PAUSE = 1000; // milliseconds after an answer until the progress is shown

export class Classes {
  /** @param {{onPick}} acts called with an entry to search with. */
  constructor({ onPick }) {
    this.acts = { onPick };
    this.pairs = [];
    this.past = []; // answers, for undo
    for (const [id, same] of [["pair-same", true], ["pair-different", false]]) {
      byId(id).addEventListener("click", () => this.answer(same));
    }
    byId("pair-skip").addEventListener("click", () => this.skip());
    byId("pair-undo").addEventListener("click", () => this.undo());
    byId("classes-more").addEventListener("click", () => this.more());
    byId("classes-export").addEventListener("click", () => download());
    byId("classes-person").addEventListener("click", () => askName({ again: true }).then(() => this.showPerson()));
    document.addEventListener("keydown", (event) => this.press(event));
  }

  /** Load the classes, at most `most`, the pairs and the conflicts. */
  async open(canMark, most) {
    this.close();
    this.turn = new AbortController();
    this.canMark = canMark;
    this.most = most;
    this.many = Math.min(PAGE, most);
    this.pairs = [];
    this.past = [];
    byId("classes-status").textContent = "Loading …";
    byId("pair").hidden = true;
    this.showPerson();
    const { signal } = this.turn;
    try {
      await this.refresh();
      if (!signal.aborted) await this.loadPairs();
    } catch (error) {
      if (!signal.aborted) byId("classes-status").textContent = error.message;
    }
  }

  /** Stop loading: the user has left the view. */
  close() {
    this.turn?.abort();
    clearTimeout(this.timer);
  }

  async refresh() {
    const { signal } = this.turn;
    const answers = await Promise.all([api.classes(this.many), api.marks(1)]);
    if (signal.aborted) return;
    const [{ classes, total }, { same, different, conflicts }] = answers;
    const named = total ? count(total, "class", "classes") : "No classes yet";
    byId("classes-status").textContent = `${named} · ${same} same · ${different} different`;
    byId("classes-empty").hidden = classes.length > 0;
    byId("classes-export").hidden = !this.canMark || !(classes.length || same || different);
    this.names = new Set(classes.filter(({ labelled }) => labelled).map(({ name }) => name));
    byId("classes-more").hidden = classes.length === total || this.many === this.most;
    replaceItems(byId("class-list"), classes.map((each) => this.card(each)));
    const serious = conflicts.filter(({ kind }) => kind !== "changed");
    const items = serious.map((conflict) => this.conflict(conflict));
    replaceItems(byId("conflict-list"), items, byId("classes-head"));
    byId("conflicts").hidden = !serious.length;
  }

  async more() {
    this.many = Math.min(this.many + PAGE, this.most);
    await this.refresh().catch((error) => say(error.message));
  }

  showPerson() {
    const name = knownName();
    byId("classes-person").hidden = !this.canMark;
    byId("classes-person").textContent = name ? `Marking as ${name}` : "Your name …";
  }

  card({ name, photos, labelled, marks, open, entries }) {
    const pictures = entries.slice(0, PHOTOS).map((entry) => this.picture(entry));
    const parts = [count(photos, "photo"), marks && count(marks, "mark"), open && `${count(open, "pair")} to decide`];
    const progress = { max: marks + open || 1, value: open ? marks : marks || 1, "aria-label": "Decided pairs" };
    return make(
      "li",
      { class: "class" },
      make("div", { class: "class-photos" }, ...pictures),
      make("h3", {}, labelled ? name : "Without a name"),
      make("p", { class: "quiet" }, parts.filter(Boolean).join(" · ")),
      make("progress", progress),
    );
  }

  picture(entry) {
    const label = `Search with ${nameOf(entry)}`;
    const image = make("img", { alt: "", loading: "lazy", decoding: "async" });
    setLazily(image, api.thumbnail(entry.key));
    const settings = { type: "button", class: "choose", "aria-label": label, title: label };
    return make("button", { ...settings, on: { click: () => this.acts.onPick(entry) } }, image);
  }

  /* Pairs */

  async loadPairs() {
    const { signal } = this.turn;
    const { suggestions } = await api.suggestions(PAIRS, signal);
    if (signal.aborted) return;
    const known = new Set(this.past.map(({ pair }) => nameOfPair(pair))); // also those that were skipped
    this.pairs = suggestions.filter((pair) => !known.has(nameOfPair(pair)));
    this.showPair();
  }

  showPair() {
    const [pair] = this.pairs;
    byId("pair").hidden = !pair && !this.past.length;
    byId("pair-photos").hidden = !pair;
    byId("pair-undo").disabled = !this.past.length;
    for (const id of ["pair-same", "pair-different", "pair-skip"]) byId(id).disabled = !pair || !this.canMark;
    byId("pair-actions").hidden = !this.canMark;
    byId("pair-locked").hidden = this.canMark;
    byId("pair-place").textContent = pair ? this.describe(pair) : "No more pairs for now.";
    if (!pair) return;
    for (const [id, entry] of [["pair-first", pair.one], ["pair-second", pair.other]]) {
      const image = byId(id);
      image.alt = nameOf(entry);
      image.onerror = () => {
        image.onerror = null;
        setPicture(image, api.thumbnail(entry.key));
      };
      setPicture(image, api.photo(entry.key));
    }
  }

  describe({ probability, score, name }) {
    const likely = probability === null ? `Score ${score.toFixed(3)}` : `${Math.round(100 * probability)}% likely`;
    return this.names.has(name) ? `${likely} · ${name}` : likely;
  }

  async answer(same) {
    const [pair] = this.pairs;
    if (!pair || this.sending) return;
    const by = await askName();
    if (by === null) return;
    this.sending = true;
    const list = same ? { same: [pair.other.key], different: [] } : { same: [], different: [pair.other.key] };
    try {
      const { marks } = await api.mark(pair.one, { ...list, by });
      this.past.push({ pair, ids: marks.map(({ id }) => id) });
      this.next();
    } catch (error) {
      say(error.message, { action: { label: "Try again", run: () => this.answer(same) } });
    } finally {
      this.sending = false;
    }
  }

  skip() {
    if (!this.pairs.length) return;
    this.past.push({ pair: this.pairs[0], ids: [] });
    this.next();
  }

  next() {
    this.pairs = this.pairs.slice(1);
    this.showPair();
    this.update();
  }

  /** Show the progress after some answers, and request other pairs after the last one. */
  update() {
    clearTimeout(this.timer);
    const { signal } = this.turn;
    const act = async () => {
      try {
        await this.refresh();
        if (!this.pairs.length && !signal.aborted) await this.loadPairs();
      } catch (error) {
        if (!signal.aborted) say(error.message);
      }
    };
    this.timer = setTimeout(act, this.pairs.length ? PAUSE : 0);
  }

  async undo() {
    const last = this.past.at(-1);
    if (!last || this.sending) return;
    this.sending = true;
    try {
      for (const id of last.ids) await api.unmark(id);
      this.past.pop();
      this.pairs = [last.pair, ...this.pairs];
      this.showPair();
      this.update();
    } catch (error) {
      say(error.message);
    } finally {
      this.sending = false;
    }
  }

  press(event) {
    const typing = event.target.matches("input, select, textarea");
    if (byId("classes").hidden || typing || document.querySelector("dialog[open]")) return;
    const undoing = (event.ctrlKey || event.metaKey) && event.key === "z";
    if (!undoing && (event.ctrlKey || event.metaKey || event.altKey)) return;
    if (!this.canMark || event.repeat) return; // each pair needs a decision
    const key = undoing ? "u" : event.key.toLowerCase();
    if (key === "s") this.answer(true);
    else if (key === "d") this.answer(false);
    else if (key === "n") this.skip();
    else if (key === "u") this.undo();
  }

  /* Conflicts */

  conflict({ kind, marks }) {
    const text = {
      people: "People disagree on this pair",
      chain: "These marks contradict each other",
      labels: "Marks and labels contradict each other",
    }[kind];
    return make(
      "li",
      { class: "conflict" },
      make("h3", {}, text),
      make("ul", {}, ...marks.map((mark) => this.disputed(mark))),
    );
  }

  disputed(mark) {
    const { id, query, entry, same, by, time } = mark;
    const photos = [query.key ? api.thumbnail(query.key) : api.queryPhoto(id), api.thumbnail(entry.key)];
    const pictures = photos.map((path) => {
      const image = make("img", { alt: "", loading: "lazy" });
      setLazily(image, path);
      return image;
    });
    const who = `${by || "Somebody"} marked this pair as ${same ? "the same" : "different"}`;
    const undo = { type: "button", class: "plain", "aria-label": `Undo: ${who}` };
    return make(
      "li",
      {},
      ...pictures,
      make("p", {}, make("b", {}, by || "Somebody"), make("span", { data: { mark: same ? "same" : "different" } }, same ? "same" : "different"), make("span", { class: "quiet" }, when(time))),
      this.canMark ? make("button", { ...undo, on: { click: () => this.resolve(id) } }, "Undo") : null,
    );
  }

  /** Undo a mark that contradicts others. */
  async resolve(id) {
    try {
      await api.unmark(id);
      await this.refresh();
    } catch (error) {
      say(error.message);
    }
  }
}

const nameOfPair = ({ one, other }) => `${one.key} ${other.key}`;

/** Save the table of labels as a file. */
async function download() {
  try {
    const url = URL.createObjectURL(await api.labels());
    make("a", { href: url, download: "labels.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    say(error.message);
  }
}
