// Fetch the number on the bell when a page opens, and every half minute while the page is visible.
const bell = document.querySelector(".bell");

async function count() {
  if (document.hidden) return;
  let unread = 0;
  try {
    const answer = await fetch(bell.dataset.unread, { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    ({ unread } = await answer.json());
  } catch { return; } // it is fetched again later
  bell.querySelector("b").textContent = unread ? (unread > 98 ? "99+" : unread) : "";
  bell.setAttribute("aria-label", unread ? `Inbox, ${unread} not read` : "Inbox, all read");
}

if (bell) {
  count();
  setInterval(count, 30_000);
  document.addEventListener("visibilitychange", count);
}
