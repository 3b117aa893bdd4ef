// The user's own photos of recent searches, so that they are there after the page is loaded again.
// They stay in the browser: in its database, without the results.

import { withPictures } from "./photos.js";

const RECENT = 20; // searches
const HOURS = 24;

/** The database; null where the browser has none, as in some private windows. */
const database = new Promise((done) => {
  try {
    const opening = indexedDB.open("listwise", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("searches", { keyPath: "name" });
    opening.onsuccess = () => done(opening.result);
    opening.onerror = () => done(null);
  } catch {
    done(null);
  }
});

const answer = (request) =>
  new Promise((done) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => done(null);
  });

/** Keep the examples of a search if one of them is a photo of the user. */
export async function keep({ name, examples }) {
  if (!examples.some(({ file }) => file)) return;
  const opened = await database;
  if (!opened) return;
  // Addresses of files in memory end with the page.
  const plain = examples.map(({ url, preview, ...rest }) => (rest.file ? rest : { ...rest, url, preview }));
  const searches = opened.transaction("searches", "readwrite").objectStore("searches");
  searches.put({ name, time: Date.now(), examples: plain });
  const all = (await answer(searches.getAll())) ?? [];
  all.sort((a, b) => b.time - a.time);
  const old = Date.now() - HOURS * 3600e3;
  for (const [place, each] of all.entries()) {
    if (place >= RECENT || each.time < old) searches.delete(each.name);
  }
}

/** The examples of a search by its name; none if they were not kept. */
export async function kept(name) {
  const opened = await database;
  if (!opened || !name) return [];
  const searches = opened.transaction("searches").objectStore("searches");
  const found = await answer(searches.get(name));
  return (found?.examples ?? []).map((example) => (example.file ? withPictures(example) : example));
}
