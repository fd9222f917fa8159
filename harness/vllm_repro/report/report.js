// Filters of the trials and the search of the logs. Everything is on the page without them.
(() => {
  "use strict";
  const all = (selector) => [...document.querySelectorAll(selector)];

  const filters = document.querySelector(".filters");
  if (filters) {
    const arm = filters.querySelector("select");
    const outcomes = all("button.outcome");
    const trials = all(".trial");
    const apply = () => {
      const wanted = new Set(outcomes.filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.outcome));
      let shown = 0;
      for (const trial of trials) {
        trial.hidden = !wanted.has(trial.dataset.outcome) || (arm.value !== "" && arm.value !== trial.dataset.arm);
        shown += trial.hidden ? 0 : 1;
      }
      document.getElementById("shown").textContent = `${shown} of ${trials.length}`;
    };
    arm.addEventListener("change", apply);
    for (const button of outcomes) {
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
        apply();
      });
    }
    const unfold = filters.querySelector(".unfold");
    unfold.addEventListener("click", () => {
      const open = unfold.textContent === "Open all";
      for (const trial of trials) trial.open = open;
      unfold.textContent = open ? "Close all" : "Open all";
    });
    filters.hidden = false;
    apply();
  }

  const search = document.querySelector(".search");
  if (search && window.CSS && CSS.highlights && window.Highlight) {
    const most = 5000;
    const needle = document.getElementById("needle");
    const told = document.getElementById("hits");
    const texts = all(".lines pre").map((pre) => pre.firstChild).filter(Boolean);
    const lowered = texts.map((text) => text.data.toLowerCase());
    let hits = [];
    let at = -1;
    const say = () => {
      const count = hits.length >= most ? `${most} or more` : String(hits.length);
      told.textContent = needle.value === "" ? "" : hits.length === 0 ? "not found" : at < 0 ? `${count} found` : `${at + 1} of ${count}`;
    };
    const find = () => {
      const wanted = needle.value.toLowerCase();
      hits = [];
      at = -1;
      for (let number = 0; wanted !== "" && number < texts.length && hits.length < most; number += 1) {
        // Lowering a letter may give two: then places would be wrong, and that text is searched as it is written.
        const same = lowered[number].length === texts[number].data.length;
        const text = same ? lowered[number] : texts[number].data;
        const word = same ? wanted : needle.value;
        for (let place = text.indexOf(word); place >= 0 && hits.length < most; place = text.indexOf(word, place + word.length)) {
          const range = document.createRange();
          range.setStart(texts[number], place);
          range.setEnd(texts[number], place + word.length);
          hits.push(range);
        }
      }
      CSS.highlights.set("hits", new Highlight(...hits));
      CSS.highlights.delete("hit");
      say();
    };
    const go = (step) => {
      if (hits.length === 0) return;
      at = at < 0 ? (step > 0 ? 0 : hits.length - 1) : (at + step + hits.length) % hits.length;
      const pre = hits[at].startContainer.parentElement;
      for (let fold = pre.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
      CSS.highlights.set("hit", new Highlight(hits[at]));
      const lines = pre.closest(".lines");
      lines.scrollIntoView({ block: "nearest" });
      const box = hits[at].getBoundingClientRect();
      const frame = lines.getBoundingClientRect();
      if (box.top < frame.top + 24 || box.bottom > frame.bottom - 24) lines.scrollTop += box.top - frame.top - lines.clientHeight / 2;
      if (box.left < frame.left || box.right > frame.right) lines.scrollLeft += box.left - frame.left - lines.clientWidth / 2;
      say();
    };
    let waiting = 0;
    needle.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(find, 120);
    });
    needle.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      clearTimeout(waiting);
      if (at < 0) find();
      go(event.shiftKey ? -1 : 1);
    });
    document.getElementById("after").addEventListener("click", () => go(1));
    document.getElementById("before").addEventListener("click", () => go(-1));
    search.hidden = false;
  }
})();
