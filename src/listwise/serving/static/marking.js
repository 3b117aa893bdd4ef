// Marking the results of a search: the bar with the counts, undo, and saving on the server.

import * as api from "./api.js";
import { byId } from "./dom.js";
import { say } from "./notice.js";
import { askName } from "./person.js";

export class Marking {
  /**
   * @param {{onChange, query, canSave}} acts `onChange()` orders the results again, `query(example)` is
   *   what the server gets as the query of marks, `canSave()` whether the server stores marks.
   */
  constructor(acts) {
    this.acts = acts;
    this.marks = null;
    this.saving = false;
    this.last = Promise.resolve(); // the last save
    byId("mark-undo").addEventListener("click", () => this.undo());
    byId("mark-save").addEventListener("click", () => this.save());
    byId("mark-mode").addEventListener("click", ({ currentTarget }) => {
      const on = currentTarget.ariaPressed !== "true";
      currentTarget.ariaPressed = String(on);
      byId("results").classList.toggle("marking", on);
    });
  }

  /** Show the marks of another query. */
  open(marks) {
    this.marks = marks;
    this.show();
  }

  of(key) {
    return this.marks?.of(key);
  }

  /** Mark items with the places `rank` in the results; the same mark again removes it. */
  mark(items, same) {
    const again = items.length === 1 && this.of(items[0].key) === same;
    this.set(items.map((item) => ({ ...item, same: again ? undefined : same })));
  }

  /** Change marks in one step. */
  set(changes) {
    this.marks.set(changes);
    this.show();
    this.acts.onChange();
  }

  /** Take the last step back, also on the server if it was saved. */
  async undo() {
    const { marks } = this;
    if (!marks?.past.length) return;
    const keys = marks.undo();
    this.show();
    this.acts.onChange();
    const open = new Set(marks.changed());
    if (this.acts.canSave() && keys.some((key) => marks.stored.has(key) && open.has(key))) await this.save();
  }

  /**
   * Save marks, after those that are being saved; whether the server has stored them.
   * `again` is what the button of an error message does.
   */
  save(marks = this.marks, again = () => this.save(marks)) {
    const act = () => this.saveNow(marks, again);
    this.last = this.last.then(act, act);
    return this.last;
  }

  async saveNow(marks, again) {
    const by = await askName();
    if (by === null) return false;
    this.saving = true;
    this.show();
    try {
      await this.send(marks, by);
      return true;
    } catch (error) {
      say(error.message, { action: { label: "Try again", run: again } });
      return false;
    } finally {
      this.saving = false;
      this.show();
    }
  }

  async send(marks, by) {
    const { undone, ...added } = marks.unsaved();
    for (const [key, id] of undone) {
      await api.unmark(id).catch((error) => {
        if (error.status !== 404) throw error; // somebody else has undone it
      });
      marks.removed(key);
    }
    if (!added.same.length && !added.different.length) return;
    const { marks: stored, conflicts } = await api.mark(await this.acts.query(marks.example), { ...added, by });
    marks.saved(stored);
    if (conflicts.length) say(describeConflict(conflicts[0], stored), showConflicts);
  }

  show() {
    const { marks } = this;
    const bar = byId("mark-bar");
    const [same, different] = [true, false].map((value) => marks?.keys(value).length ?? 0);
    const open = Boolean(marks?.changed().length);
    const canSave = this.acts.canSave();
    bar.hidden = !same && !different && !open && !marks?.past.length;
    byId("label-open").hidden = !canSave || !bar.hidden; // the bar has this button, too
    byId("mark-label").hidden = !canSave;
    byId("mark-same").textContent = same;
    byId("mark-different").textContent = different;
    byId("mark-undo").disabled = !marks?.past.length || this.saving;
    byId("mark-save").hidden = !canSave;
    byId("mark-save").disabled = !open || this.saving;
    byId("mark-save").textContent = this.saving ? "Saving …" : open ? "Save" : "Saved";
    byId("mark-note").hidden = canSave;
  }
}

const showConflicts = { kind: "news", action: { label: "Show conflicts", run: () => (location.hash = "#/classes") } };

/** "3 Nov, 12:04" of a time in ISO 8601. */
export function when(time) {
  const format = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Intl.DateTimeFormat("en-GB", format).format(new Date(time));
}

const verdict = ({ same }) => (same ? "the same" : "different");

function describeConflict({ marks }, own) {
  const mine = new Set(own.map(({ id }) => id));
  const other = marks.find(({ id }) => !mine.has(id)) ?? marks[0];
  const who = other.by || "Somebody";
  return `Your mark is saved, but ${who} marked ${other.entry.id} as ${verdict(other)} on ${when(other.time)}.`;
}
