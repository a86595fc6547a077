// The views of the page: one is shown, and its name is in the address, so that a reload shows it.
import { at } from "./dom.js";

export function openTabs(onChange) {
  const all = [...document.querySelectorAll("[role=tab]")];
  // One for which there is a switch is shown to who has opened it by its address.
  let tabs = all.filter((tab) => !tab.hidden);
  const panelOf = (tab) => tab.getAttribute("aria-controls");

  function choose(chosen) {
    chosen.hidden = false;
    tabs = all.filter((tab) => !tab.hidden);
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      at(panelOf(tab)).hidden = tab !== chosen;
    }
    document.body.dataset.view = panelOf(chosen);
    onChange(panelOf(chosen));
  }

  function choosePanel(name) {
    choose(all.find((tab) => panelOf(tab) === name) ?? tabs[0]);
  }

  const steps = { ArrowRight: 1, ArrowLeft: -1 };
  for (const tab of all) {
    tab.addEventListener("click", () => {
      history.replaceState(null, "", `#${panelOf(tab)}`);
      choose(tab);
    });
    tab.addEventListener("keydown", ({ key }) => {
      const ends = { Home: 0, End: tabs.length - 1 };
      const index = key in steps ? (tabs.indexOf(tab) + steps[key] + tabs.length) % tabs.length : ends[key];
      if (index === undefined) return;
      tabs[index].focus();
      tabs[index].click();
    });
  }
  window.addEventListener("hashchange", () => choosePanel(location.hash.slice(1)));
  choosePanel(location.hash.slice(1));
}
