// Runs before the first paint, so that nobody sees the wrong colours flash by.
(() => {
  const kept = localStorage.getItem("listwise-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
})();
