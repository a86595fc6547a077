// Starts the page: its views, and the lists of the server's models.
import { openChat } from "./chat.js";
import { openCompare } from "./compare.js";
import { watchInspect } from "./inspect.js";
import { watchLoad } from "./load.js";
import { watchModels } from "./loads.js";
import { keepModels } from "./models.js";
import { openRank } from "./rank.js";
import { openRequests } from "./requests.js";
import { openTabs } from "./tabs.js";
import { watchUsage } from "./usage.js";

openChat();
openCompare();
openRank();
openRequests();
openTabs((view) => {
  watchLoad(view === "load");
  watchModels(view === "load");
  watchUsage(view === "load");
  watchInspect(view === "inspect");
});
keepModels();
