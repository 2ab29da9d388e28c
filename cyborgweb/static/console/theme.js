// Apply the theme to our own pages. It is stored where unfold's pages store it. The file is loaded in <head>, so that
// the page does not flicker.
(function () {
  function chosen() {
    try { return JSON.parse(localStorage.getItem("adminTheme")) || "auto"; } catch (error) { return "auto"; }
  }
  function show(theme) {
    document.documentElement.classList.toggle("dark", theme === "dark");
    document.documentElement.classList.toggle("light", theme === "light");
    document.querySelectorAll("[data-theme]").forEach(function (button) {
      button.setAttribute("aria-pressed", String(button.dataset.theme === theme));
    });
  }
  show(chosen());
  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll(".themes").forEach(function (row) { row.hidden = false; });
    document.querySelectorAll("[data-theme]").forEach(function (button) {
      button.addEventListener("click", function () {
        localStorage.setItem("adminTheme", JSON.stringify(button.dataset.theme));
        show(button.dataset.theme);
      });
    });
    show(chosen());
  });
})();
