// Groups of photos that are in the index more than once.

import * as api from "./api.js";
import { byId, count, make } from "./dom.js";
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
    this.canWrite = canWrite;
    this.shown = 0;
    this.list.replaceChildren();
    byId("duplicates-more").hidden = true;
    byId("duplicates-count").textContent = "Comparing the photos …";
    await this.more();
  }

  async more() {
    try {
      const { groups, total } = await api.duplicates(this.shown, GROUPS);
      this.shown += groups.length;
      this.list.append(...groups.map((group) => this.group(group)));
      byId("duplicates-more").hidden = this.shown >= total;
      byId("duplicates-count").textContent = total
        ? `${count(total, "group")} of photos that look the same`
        : "No duplicates were found.";
    } catch (error) {
      byId("duplicates-count").textContent = error.message;
    }
  }

  group({ exact, score, entries }) {
    const title = exact ? "Same file" : `Score ${score.toFixed(3)}`;
    const items = entries.map((entry) => this.item(entry));
    const label = `${title}: ${entries.map(nameOf).join(", ")}`;
    return make(
      "li",
      {},
      make("h3", {}, title),
      make("ul", { class: "pair", "aria-label": label }, ...items),
    );
  }

  item(entry) {
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
        ? make("button", { ...remove, on: { click: () => this.remove(entry, item) } }, "Remove")
        : null,
    );
    return item;
  }

  async remove(entry, item) {
    if (await this.acts.onRemove(entry)) item.remove();
  }
}
