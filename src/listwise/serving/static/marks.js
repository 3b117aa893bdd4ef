// Marks of results: whether a photo shows the same thing as the query, or a different one.
// They are kept in the browser, so that they are there after the page is loaded again.

import { iconButton, make } from "./dom.js";

const KEPT = "listwise-marks";
const RECENT = 50; // searches
export const MOST = 1000; // marks that a request may have

const read = () => {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {}; // another program wrote it
  }
};

/** A text that is the same for the same query. */
export function queryName(examples) {
  const names = examples.map(({ key, file, box }) => {
    const name = key ?? `${file.name}/${file.size}/${file.lastModified}`;
    return box ? `${name}:${box.join("-")}` : name;
  });
  return names.join(",");
}

/** The marks of one query: those of the user, and those that the server has stored. */
export class QueryMarks {
  /** @param {Object} example what they belong to: the first example of the query. */
  constructor(name, example) {
    this.name = name;
    this.example = example;
    this.loaded = false; // whether the stored marks of others were requested
    const { marks = [], stored = [] } = read()[name] ?? {};
    this.marks = new Map(marks); // key -> {same, rank}
    this.stored = new Map(stored); // key -> {same, id}
    this.past = [];
  }

  /** True for same, false for different, undefined without a mark. */
  of(key) {
    return this.marks.get(key)?.same;
  }

  /** Keys of the photos with this mark, among the latest `most` marks. */
  keys(same, most = Infinity) {
    return [...this.marks].slice(-most).filter(([, mark]) => mark.same === same).map(([key]) => key);
  }

  get size() {
    return this.marks.size;
  }

  /** Mark photos in one step; `same` undefined removes a mark. */
  set(changes) {
    this.past.push(changes.map(({ key }) => [key, this.marks.get(key)]));
    for (const { key, same, rank } of changes) {
      if (same === undefined) this.marks.delete(key);
      else this.marks.set(key, { same, rank });
    }
    this.keep();
  }

  /** Return to the marks before the last step; the keys that changed. */
  undo() {
    const before = this.past.pop() ?? [];
    for (const [key, mark] of before) {
      if (mark) this.marks.set(key, mark);
      else this.marks.delete(key);
    }
    this.keep();
    return before.map(([key]) => key);
  }

  /** Add marks that the server has stored, the latest first; marks that are not saved stay. */
  load(latest) {
    this.loaded = true;
    const stored = latest.toReversed(); // of two marks of a photo the later one counts
    const changed = new Set(this.changed());
    this.stored = new Map(stored.map(({ entry, same, id }) => [entry.key, { same, id }]));
    const own = [...this.marks].filter(([key]) => changed.has(key));
    const theirs = stored.map(({ entry, same, rank }) => [entry.key, { same, rank }]);
    this.marks = new Map([...theirs.filter(([key]) => !changed.has(key)), ...own]);
    this.keep();
  }

  /** Keys whose marks differ from the stored ones. */
  changed() {
    const keys = new Set([...this.marks.keys(), ...this.stored.keys()]);
    return [...keys].filter((key) => this.of(key) !== this.stored.get(key)?.same);
  }

  /** What has to be sent to the server: new marks, and ids of marks to undo. */
  unsaved() {
    const changed = this.changed();
    const pick = (same) => changed.filter((key) => this.of(key) === same);
    const ranked = changed.filter((key) => this.marks.get(key)?.rank);
    return {
      same: pick(true),
      different: pick(false),
      undone: pick(undefined).map((key) => [key, this.stored.get(key).id]),
      ranks: Object.fromEntries(ranked.map((key) => [key, this.marks.get(key).rank])),
    };
  }

  /** The server has stored marks. */
  saved(marks) {
    for (const { entry, same, id } of marks) this.stored.set(entry.key, { same, id });
    this.keep();
  }

  /** Photos are no longer in the index. */
  forget(keys) {
    for (const key of keys) {
      this.marks.delete(key);
      this.stored.delete(key);
    }
    if (keys.length) this.keep();
  }

  /** The server has undone the mark of a photo. */
  removed(key) {
    this.stored.delete(key);
    this.keep();
  }

  keep() {
    const all = read();
    const entry = { time: Date.now(), marks: [...this.marks], stored: [...this.stored] };
    const others = Object.entries(all).filter(([name]) => name !== this.name);
    others.sort(([, a], [, b]) => b.time - a.time);
    const kept = others.slice(0, RECENT - 1);
    if (this.size || this.stored.size) kept.push([this.name, entry]);
    try {
      localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(kept)));
    } catch {
      // The storage is full: the marks are kept until the page is closed.
    }
  }
}

/** The two buttons of a photo; `act` is called with true for same and false for different. */
export function markButtons(name, act) {
  const button = (same, symbol, label) =>
    iconButton(symbol, `${label}: ${name}`, (event) => act(same, event), {
      class: `round ${same ? "same" : "different"}`,
      title: `${label} (${label[0]})`,
      tabindex: "-1",
    });
  return make(
    "div",
    { class: "verdict" },
    button(true, "check", "Same"),
    button(false, "close", "Different"),
  );
}

/** Show the mark of a photo on the element that has its buttons. */
export function showMark(element, same) {
  if (same === undefined) delete element.dataset.mark;
  else element.dataset.mark = same ? "same" : "different";
  for (const [name, value] of [["same", true], ["different", false]]) {
    element.querySelector(`button.${name}`)?.setAttribute("aria-pressed", String(same === value));
  }
}
