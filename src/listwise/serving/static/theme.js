// Runs before the first paint, so that the page never appears in the wrong colors.
(() => {
  const stored = localStorage.getItem("listwise-theme");
  if (stored === "dark" || stored === "light") document.documentElement.dataset.theme = stored;
})();
