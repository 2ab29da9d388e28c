// Keeps what is under way up to date: each [data-live] names the address of its own piece of the page, asked for once a
// second while somebody looks. When something has ended, the whole page is shown anew, unless somebody is writing in it.
(function () {
  const EVERY_MS = 1000, AWAY_MS = 5000;
  function isWritten() {
    return Array.from(document.querySelectorAll("main input")).some(input => input.value !== input.defaultValue);
  }
  function follow(piece) {
    async function look() {
      if (document.hidden) return setTimeout(look, EVERY_MS);
      let answer;
      try {
        answer = await fetch(piece.dataset.live);
        if (answer.status >= 500) throw new Error(answer.statusText);
      } catch (error) {
        return setTimeout(look, AWAY_MS);
      }
      if (answer.redirected || !answer.ok) return;
      const now = new DOMParser().parseFromString(await answer.text(), "text/html").body.firstElementChild;
      if (now.dataset.open !== piece.dataset.open && !isWritten()) return location.reload();
      if (!piece.contains(document.activeElement)) piece.replaceChildren(...now.childNodes);
      if (now.dataset.live) setTimeout(look, EVERY_MS);
    }
    setTimeout(look, EVERY_MS);
  }
  document.querySelectorAll("[data-live]").forEach(follow);
})();
