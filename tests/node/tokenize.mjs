// Tokens as llama.cpp cuts them: a JSON list of texts from standard input; for each file a list of lists of ids, as JSON, to
// standard output.
//
//     node tokenize.mjs FOLDER-WITH-NODE-LLAMA-CPP FILE.gguf... < texts.json
//
// Texts of special tokens become these tokens, and no begin or end of the text is added, as with a rendered chat template.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, ...files] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(`${folder}/`)).resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(entry));

const texts = JSON.parse(readFileSync(0, "utf8"));
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: "disabled" });
const all = [];
for (const modelPath of files) {
    const model = await llama.loadModel({ modelPath, vocabOnly: true });
    all.push(texts.map((text) => model.tokenize(text, true)));
    await model.dispose();
}
process.stdout.write(JSON.stringify(all));
await llama.dispose();
