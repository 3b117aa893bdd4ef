// Filters of the results: one list of values for each attribute with few of them.

import { make } from "./dom.js";

const MOST = 8; // attributes

const word = (name) => `"${name.replaceAll('"', '""')}"`;
const text = (value) => `'${value.replaceAll("'", "''")}'`;

/** The expression of chosen values for the server: {color: "red"} -> "color" = 'red'. */
export function toExpression(filters) {
  return Object.entries(filters)
    .map(([name, value]) => `${word(name)} = ${text(value)}`)
    .join(" and ");
}

export class FilterBar {
  /** @param {(filters: Object) => void} onChange called with the chosen values. */
  constructor(bar, onChange) {
    this.bar = bar;
    this.onChange = onChange;
    this.facets = [];
  }

  /** Set the attributes with their values and counts. */
  set(facets) {
    const useful = facets.filter(({ values }) => values.length > 1);
    this.facets = useful.slice(0, MOST);
  }

  /** Show the attributes with the chosen values. */
  show(filters) {
    const names = new Set([...this.facets.map(({ name }) => name), ...Object.keys(filters)]);
    const lists = [...names].map((name) => this.list(name, filters));
    const clear = make("button", { type: "button", class: "plain" }, "Clear filters");
    clear.addEventListener("click", () => this.onChange({}));
    this.bar.replaceChildren(...lists, ...(Object.keys(filters).length ? [clear] : []));
    this.bar.hidden = !names.size;
  }

  list(name, filters) {
    const values = this.facets.find((facet) => facet.name === name)?.values ?? [];
    const chosen = filters[name];
    const list = make("select", {}, make("option", { value: "-1" }, "all"));
    const known = values.some(({ value }) => value === chosen) || chosen === undefined;
    const shown = known ? values : [...values, { value: chosen, count: 0 }];
    shown.forEach(({ value, count }, number) => {
      const option = { value: String(number), selected: value === chosen };
      list.append(make("option", option, `${value} (${count.toLocaleString("en")})`));
    });
    list.addEventListener("change", () => {
      const { [name]: _, ...others } = filters;
      const value = shown[Number(list.value)]?.value;
      this.onChange(value === undefined ? others : { ...others, [name]: value });
      this.focus(name);
    });
    return make("label", { data: { filter: name } }, make("span", {}, name), list);
  }

  /** Return the keyboard focus to a list, which was made again. */
  focus(name) {
    for (const label of this.bar.querySelectorAll("label")) {
      if (label.dataset.filter === name) label.querySelector("select").focus();
    }
  }
}
