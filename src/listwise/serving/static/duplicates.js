// Groups of photos that are in the index more than once.

import * as api from "./api.js";
import { byId, count, make, sleep } from "./dom.js";
import { nameAll, nameOf } from "./grid.js";
import { setLazily } from "./pictures.js";

const GROUPS = 30; // that are shown together

export class Duplicates {
  /** @param {{onView, onRemove}} acts `onView` shows one of some entries, `onRemove` removes them. */
  constructor({ onView, onRemove }) {
    this.acts = { onView, onRemove };
    this.list = byId("duplicate-groups");
    byId("duplicates-more").addEventListener("click", () => this.more());
  }

  /** Load the first groups. */
  async open(canWrite) {
    this.close();
    this.turn = new AbortController();
    this.loading = false;
    this.canWrite = canWrite;
    this.shown = 0;
    this.removed = 0;
    this.groups = new Map();
    this.list.replaceChildren();
    byId("duplicates-more").hidden = true;
    byId("duplicates-count").textContent = "Comparing the photos …";
    await this.more();
  }

  /** Stop loading: the user has left the view. */
  close() {
    this.turn?.abort();
  }

  async more() {
    if (this.loading) return;
    this.loading = true;
    const { signal } = this.turn;
    try {
      const { groups, total } = await this.request(signal);
      if (signal.aborted) return;
      const keys = [...this.list.querySelectorAll("[data-key]")].map(({ dataset }) => dataset.key);
      const known = new Set(keys);
      const next = groups.filter(({ entries }) => !entries.some(({ key }) => known.has(key)));
      this.shown = this.list.children.length + next.length;
      this.total = total;
      this.removed = 0;
      this.list.append(...next.map((group) => this.group(group)));
      this.showCount();
    } catch (error) {
      if (!signal.aborted) byId("duplicates-count").textContent = error.message;
    } finally {
      if (!signal.aborted) this.loading = false;
    }
  }

  /** Request the next groups, again while the server compares the photos. */
  async request(signal) {
    for (;;) {
      const { shown, removed } = this;
      // Without a photo, a group may move to another place: some groups are requested again.
      const again = Math.min(removed, shown, GROUPS);
      try {
        const answer = await api.duplicates(shown - again, GROUPS + again, signal);
        // A group that has disappeared meanwhile moves the next ones.
        if (signal.aborted || (this.shown === shown && this.removed === removed)) return answer;
      } catch (error) {
        if (signal.aborted || error.status !== 503) throw error;
        await sleep(1000 * error.wait, signal);
      }
    }
  }

  showCount() {
    byId("duplicates-more").hidden = this.shown >= this.total;
    byId("duplicates-count").textContent = this.total
      ? `${count(this.total, "group")} of photos that look the same`
      : "No duplicates were found.";
  }

  group({ exact, score, reason, size, entries }) {
    nameAll(entries);
    const title = exact ? "Same content" : `Copies, score ${score.toFixed(2)}`;
    const label = `${title}: ${entries.map(nameOf).join(", ")}`;
    // `left`: photos of the group that are not removed, and not being removed.
    const group = { entries, left: size, others: size - entries.length };
    group.photos = make("ul", { class: "pair", "aria-label": label });
    group.photos.append(...entries.map((entry, at) => this.item(entry, group, at ? "" : reason)));
    group.actions = make("div", { class: "actions" });
    const others = `and ${count(group.others, "more photo")}`;
    group.element = make(
      "li",
      {},
      make("h3", {}, title),
      group.photos,
      group.others ? make("p", { class: "quiet" }, others) : null,
      group.actions,
    );
    for (const item of group.photos.children) this.groups.set(item, group);
    this.offer(group);
    return group.element;
  }

  item(entry, group, reason) {
    const name = nameOf(entry);
    const image = make("img", { alt: name, loading: "lazy", decoding: "async" });
    setLazily(image, api.thumbnail(entry.key));
    const view = () => this.acts.onView(group.entries, group.entries.indexOf(entry));
    const enlarge = { type: "button", class: "choose", "aria-label": `Show ${name}`, on: { click: view } };
    const remove = { type: "button", class: "plain danger", "aria-label": `Remove ${name}` };
    const act = { click: () => this.ask(group, [entry]) };
    const same = entry.copies.length && `The same file is also ${entry.copies.join(", ")}`;
    return make(
      "li",
      { data: { key: entry.key } },
      make("button", enlarge, image),
      make("span", { title: entry.id }, name),
      make("span", { class: "quiet" }, `${entry.width} × ${entry.height}`),
      reason && group.left > 1 ? make("span", { class: "best" }, `Best: ${reason}`) : null,
      same ? make("span", { class: "quiet" }, same) : null,
      this.canWrite && group.left > 1 ? make("button", { ...remove, on: act }, "Remove") : null,
    );
  }

  /** Offer to keep only the first photo of a group. */
  offer(group) {
    const rest = group.entries.slice(1);
    const keep = { type: "button", class: "plain keep", on: { click: () => this.ask(group, rest) } };
    const label = `Keep ${nameOf(group.entries[0])}, remove ${count(rest.length, "other")}`;
    const shown = this.canWrite && rest.length ? [make("button", keep, label)] : [];
    group.actions.replaceChildren(...shown);
  }

  /** Ask whether to remove photos of a group, and say what happens to their files. */
  ask(group, entries) {
    const remove = { type: "button", class: "solid danger", on: { click: () => this.remove(group, entries) } };
    const cancel = { type: "button", class: "plain", on: { click: () => this.offer(group) } };
    const button = make("button", remove, "Remove");
    group.actions.replaceChildren(make("p", {}, question(entries)), button, make("button", cancel, "Cancel"));
    button.focus();
  }

  /** Remove photos, but not the last one of a group. */
  async remove(group, entries) {
    if (group.busy || group.left <= entries.length) return;
    group.busy = true;
    await this.acts.onRemove(entries);
    group.busy = false;
    if (group.element.isConnected) this.offer(group);
  }

  /** An entry is no longer in the index. */
  drop(key) {
    const item = this.list.querySelector(`[data-key="${key}"]`);
    if (!item) return;
    const group = this.groups.get(item);
    item.remove();
    this.removed += 1;
    group.left -= 1;
    group.entries = group.entries.filter((entry) => entry.key !== key);
    this.offer(group);
    if (group.left > 1) return;
    group.element.remove();
    this.shown -= 1;
    this.total -= 1;
    this.showCount();
  }

  /** Return the keyboard focus to a photo; whether it is shown. */
  focus({ key }) {
    const item = byId("duplicates").hidden ? null : this.list.querySelector(`[data-key="${key}"] button`);
    item?.focus();
    return item !== null;
  }
}

/** What is lost when these entries are removed. */
function question(entries) {
  const names = (some) => some.map(nameOf).join(", ");
  const [uploaded, kept] = [true, false].map((own) => entries.filter((entry) => entry.uploaded === own));
  const files = (some) => (some.length === 1 ? "The file" : "The files");
  return [
    `Remove ${names(entries)} from the index?`,
    kept.length && `${files(kept)} ${names(kept)} will not be deleted.`,
    uploaded.length && `${files(uploaded)} ${names(uploaded)} will be deleted.`,
  ].filter(Boolean).join(" ");
}
