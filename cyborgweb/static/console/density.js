// Switch all lists between comfortable and compact rows. The choice is stored in this browser. The file is loaded in
// <head>, so that the rows do not move after they were drawn.
(function () {
  const root = document.documentElement;
  function show(density) {
    root.classList.toggle("compact", density === "compact");
    document.querySelectorAll("[data-density]").forEach(function (button) {
      button.hidden = false;
      button.setAttribute("aria-pressed", String(button.dataset.density === density));
    });
  }
  show(localStorage.getItem("density"));
  document.addEventListener("DOMContentLoaded", function () { show(localStorage.getItem("density")); });
  document.addEventListener("click", function (event) {
    const button = event.target.closest("[data-density]");
    if (!button) return;
    const density = root.classList.contains("compact") ? "comfortable" : button.dataset.density;
    localStorage.setItem("density", density);
    show(density);
  });
})();
