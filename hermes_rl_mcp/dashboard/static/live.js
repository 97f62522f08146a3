// Keeps a page up to date: fetches it again and puts in the parts marked data-live that have changed. What a reader is
// doing stays as it is: open folds, the place in a log, a selection, a field being typed in. Also shows the value of a
// curve under the pointer. Nothing here is needed to read the pages.
"use strict";

(() => {
  const wait = Number(document.body.dataset.refreshS || 0) * 1000;
  const badge = document.getElementById("live");
  const known = new Map();
  let tag = null;
  let lost = 0;

  function inUse(part) {
    const active = document.activeElement;
    if (active && part.contains(active) && active.matches("input:not([type=checkbox]), select, textarea")) return true;
    const selection = getSelection();
    return Boolean(selection && !selection.isCollapsed && part.contains(selection.anchorNode));
  }

  function toEnd(root) {
    for (const box of root.querySelectorAll("[data-keep-end]")) box.scrollTop = box.scrollHeight;
  }

  function put(part, fresh) {
    const open = new Map([...part.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
    const boxes = [...part.querySelectorAll("[data-keep-end]")].map((box) => ({
      top: box.scrollTop,
      atEnd: box.scrollHeight - box.scrollTop - box.clientHeight < 24,
    }));
    const chosen = new Set([...part.querySelectorAll("input:checked")].map((one) => one.value));
    part.replaceChildren(...fresh.childNodes);
    for (const one of part.querySelectorAll("input[type=checkbox]")) one.checked = chosen.has(one.value);
    for (const one of part.querySelectorAll("details[id]")) if (open.has(one.id)) one.open = open.get(one.id);
    [...part.querySelectorAll("[data-keep-end]")].forEach((box, index) => {
      const before = boxes[index];
      box.scrollTop = !before || before.atEnd ? box.scrollHeight : before.top;
    });
  }

  function apply(html) {
    const next = new DOMParser().parseFromString(html, "text/html");
    document.title = next.title;
    let all = true;
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = next.getElementById(part.id);
      if (!fresh) continue;
      const text = fresh.innerHTML;
      if (known.get(part.id) === text) continue;
      if (inUse(part)) { all = false; continue; }
      put(part, fresh);
      known.set(part.id, text);
    }
    const every = Number(next.body.dataset.refreshS || 0) * 1000;
    return { all, every };
  }

  function say(text, state) {
    badge.hidden = false;
    badge.className = `live ${state}`;
    badge.textContent = text;
  }

  async function look() {
    let every = wait;
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, {
          headers: tag ? { "If-None-Match": tag } : {},
          cache: "no-store",
          signal: AbortSignal.timeout(15000),
        });
        if (answer.status === 401) { location.reload(); return; }
        if (answer.status === 200) {
          const done = apply(await answer.text());
          tag = done.all ? answer.headers.get("ETag") : null;
          every = done.every || wait;
        } else if (answer.status !== 304) throw new Error(String(answer.status));
        lost = 0;
        say(`Updated ${new Date().toLocaleTimeString()}`, every > 5000 ? "still" : "");
      } catch {
        lost += 1;
        if (lost > 1) say("Server not reachable", "lost");
        every = Math.min(30000, wait * 2 ** Math.min(lost, 4));
      }
    }
    setTimeout(look, every);
  }

  toEnd(document);
  for (const part of document.querySelectorAll("[data-live]")) known.set(part.id, part.innerHTML);
  if (wait) {
    setTimeout(look, wait);
    document.addEventListener("visibilitychange", () => { if (!document.hidden) badge.hidden = lost === 0 && badge.hidden; });
  }

  // The value under the pointer
  let pointed = null;

  function leave() {
    if (!pointed) return;
    const { cursor, now, before } = pointed;
    cursor.remove();
    now.textContent = before;
    now.classList.remove("pointed");
    pointed = null;
  }

  document.addEventListener("pointermove", (event) => {
    const plot = event.target instanceof Element ? event.target.closest("svg[data-points]") : null;
    if (!plot) { leave(); return; }
    if (!pointed || pointed.plot !== plot) {
      leave();
      const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cursor.setAttribute("class", "cursor");
      const now = plot.closest("figure").querySelector(".chart-now");
      pointed = { plot, cursor, now, before: now.textContent, data: JSON.parse(plot.dataset.points) };
      plot.append(cursor);
    }
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    const near = pointed.data.lines.map((line) =>
      line.at.reduce((best, one) => (Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best)));
    const place = near.reduce((best, one) => (Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best));
    const { cursor, now, data } = pointed;
    cursor.setAttribute("x1", place[0]);
    cursor.setAttribute("x2", place[0]);
    cursor.setAttribute("y1", data.top);
    cursor.setAttribute("y2", data.bottom);
    const there = near.map((one, index) => [data.lines[index].label, one]).filter(([, one]) => one[2] === place[2]);
    const values = there.map(([label, one]) => (data.lines.length > 1 ? `${label} ${one[3]}` : one[3])).join(", ");
    now.textContent = `step ${place[2]}: ${values}`;
    now.classList.add("pointed");
  });
  document.addEventListener("pointerleave", leave);
})();
