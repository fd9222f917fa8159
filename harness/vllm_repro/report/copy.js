// Buttons that copy the text before them. Without a script they stay hidden, and so where nothing can be copied.
(() => {
  "use strict";
  const take = (pre) => {
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(pre.textContent);
    const chosen = window.getSelection();
    chosen.selectAllChildren(pre);
    const done = document.execCommand("copy");
    chosen.removeAllRanges();
    return done ? Promise.resolve() : Promise.reject(new Error("not copied"));
  };
  for (const button of document.querySelectorAll("button.copy")) {
    const pre = button.parentElement.querySelector("pre");
    const name = button.textContent;
    button.hidden = false;
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", () => {
      const say = (text) => {
        button.textContent = text;
        setTimeout(() => { button.textContent = name; }, 1500);
      };
      take(pre).then(() => say("Copied"), () => {
        window.getSelection().selectAllChildren(pre);
        say("Selected");
      });
    });
  }
})();
