"use strict";
// Keeps the page as it is on the hub: after an event the page is fetched again, and its parts that have changed replace
// those that are shown. What is open, chosen or being selected stays so.
(() => {
  const PAUSE = 2000, AGING = 15000; // ms between two looks: after events, and for the times that are told
  const runs = document.body.dataset.runs.split(" ").filter(Boolean); // which the page is about; none: all
  const parts = () => document.querySelectorAll("[data-live]");
  if (parts().length === 0) return;
  const shown = new Map(); // part -> what the hub last had for it
  let stream = null, timer = null, last = 0;

  function busy(part) {
    const chosen = getSelection();
    return !chosen.isCollapsed && part.contains(chosen.anchorNode);
  }

  function keep(part, fresh) {
    const folds = fresh.querySelectorAll("details");
    part.querySelectorAll("details").forEach((fold, place) => {
      if (fold.open && folds[place]?.firstChild.textContent === fold.firstChild.textContent) folds[place].open = true;
    });
    for (const box of part.querySelectorAll(".scroll[id], .chart[id]")) {
      const same = fresh.querySelector("#" + CSS.escape(box.id)), left = box.scrollLeft;
      if (same) requestAnimationFrame(() => { same.scrollLeft = left; });
    }
  }

  async function refresh() {
    timer = null;
    last = Date.now();
    try {
      const answer = await fetch(location.href);
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of parts()) {
        const fresh = page.getElementById(part.id);
        if (fresh === null || busy(part) || shown.get(part.id) === fresh.innerHTML) continue;
        shown.set(part.id, fresh.innerHTML);
        const focus = part.contains(document.activeElement) ? document.activeElement.value : null;
        keep(part, fresh);
        part.replaceWith(fresh);
        if (focus !== null) fresh.querySelector(`input[value="${CSS.escape(focus)}"]`)?.focus();
      }
    } catch { /* the hub is away: the stream comes back by itself, and then all is fetched */ }
  }

  function soon() {
    if (timer === null) timer = setTimeout(refresh, Math.max(0, last + PAUSE - Date.now()));
  }

  function heard(event) {
    const about = JSON.parse(event.data);
    if (runs.length === 0 || runs.includes(about.run ?? about.key)) soon();
  }

  // A browser opens few connections to one place: hidden pages leave theirs to the others.
  function watch() {
    if (document.hidden) {
      stream?.close();
      stream = null;
    } else if (stream === null) {
      stream = new EventSource(document.body.dataset.events);
      stream.onopen = soon;
      for (const kind of ["run", "finding"]) stream.addEventListener(kind, heard);
    }
  }

  document.addEventListener("visibilitychange", watch);
  setInterval(() => { if (!document.hidden) soon(); }, AGING);
  watch();
})();
