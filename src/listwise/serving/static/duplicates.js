// Groups of photos that are in the index more than once.

import * as api from "./api.js";
import { byId, count, make, sleep } from "./dom.js";
import { nameOf } from "./grid.js";
import { setLazily } from "./pictures.js";

const GROUPS = 30; // that are shown together

export class Duplicates {
  /** @param {{onPick, onRemove}} acts each called with an entry; `onRemove` tells whether it did. */
  constructor({ onPick, onRemove }) {
    this.acts = { onPick, onRemove };
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

  group({ exact, score, size, entries }) {
    const title = exact ? "Same file" : `Score ${score.toFixed(3)}`;
    const label = `${title}: ${entries.map(nameOf).join(", ")}`;
    // `left`: photos of the group that are not removed, and not being removed.
    const group = { left: size, others: size - entries.length };
    group.photos = make("ul", { class: "pair", "aria-label": label });
    group.photos.append(...entries.map((entry) => this.item(entry, group)));
    const others = `and ${count(group.others, "more photo")}`;
    group.element = make(
      "li",
      {},
      make("h3", {}, title),
      group.photos,
      group.others ? make("p", { class: "quiet" }, others) : null,
    );
    return group.element;
  }

  item(entry, group) {
    const name = nameOf(entry);
    const image = make("img", { alt: name, loading: "lazy", decoding: "async" });
    setLazily(image, api.thumbnail(entry.key));
    const search = { type: "button", class: "choose", "aria-label": `Search with ${name}` };
    const remove = { type: "button", class: "plain danger", "aria-label": `Remove ${name}` };
    const item = make(
      "li",
      { data: { key: entry.key } },
      make("button", { ...search, on: { click: () => this.acts.onPick(entry) } }, image),
      make("span", { class: "quiet", title: entry.id }, name),
      make("span", { class: "quiet" }, `${entry.width} × ${entry.height}`),
      this.canWrite
        ? make("button", { ...remove, on: { click: () => this.remove(entry, item, group) } }, "Remove")
        : null,
    );
    return item;
  }

  /** Remove a photo, but not the last one of its group. */
  async remove(entry, item, group) {
    const button = item.querySelector(".danger");
    if (button.disabled || group.left < 2) return;
    button.disabled = true;
    group.left -= 1;
    if (!(await this.acts.onRemove(entry))) {
      button.disabled = false;
      group.left += 1;
      return;
    }
    item.remove();
    this.removed += 1;
    if (group.photos.children.length + group.others > 1 || !group.element.isConnected) return;
    group.element.remove();
    this.shown -= 1;
    this.total -= 1;
    this.showCount();
  }
}
