// SPDX-License-Identifier: Apache-2.0
// Answers queries on a built site by the search worker of mkdocs-material, without a browser.
// node site_search.js SITE < queries.json: writes an object from each query to the pages of its hits, the best first.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const queries = JSON.parse(fs.readFileSync(0, "utf8"));
const folder = path.join(site, "assets", "javascripts", "workers");
const worker = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));

let receive;
let answered;
const context = vm.createContext({
  addEventListener: (_, listener) => (receive = listener),
  postMessage: (message) => answered(message),
  importScripts: () => {},
  console,
});
context.self = context;
vm.runInContext(fs.readFileSync(path.join(folder, worker), "utf8"), context);

const ask = (data) =>
  new Promise((resolve) => {
    answered = resolve;
    receive({ data });
  });

(async () => {
  await ask({ type: 0, data: { config: index.config, docs: index.docs, options: { suggest: true } } });
  const found = {};
  for (const query of queries) {
    const { data } = await ask({ type: 2, data: query });
    found[query] = data.items.map((sections) => sections[0].location.split("#")[0]);
  }
  process.stdout.write(JSON.stringify(found));
})();
