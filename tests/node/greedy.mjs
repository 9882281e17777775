// Greedy answers of llama.cpp, with KV in f32: prompts as a JSON list of texts from standard input; a JSON list of
// `{ "prompt": [ids], "answer": [ids] }` to standard output.
//
//     node greedy.mjs FOLDER-WITH-NODE-LLAMA-CPP FILE.gguf TOKENS < prompts.json
//
// FILE.gguf should hold f32 weights: llama.cpp rounds activations to multiply them with quantized ones.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, modelPath, count] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(`${folder}/`)).resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(entry));

const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: "error" });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({
    contextSize: 4096,
    experimentalKvCacheKeyType: "F32",
    experimentalKvCacheValueType: "F32",
    // Its own sums of values are less exact: a thousandth of a logit, where everything else differs by a fiftieth of that.
    flashAttention: false,
    swaFullCache: true,
    // More wait for each other by spinning, which takes forever on a machine that has other work.
    threads: 1,
});
const answers = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
    const sequence = context.getSequence();
    const prompt = model.tokenize(text, true);
    if (model.tokens.shouldPrependBosToken) prompt.unshift(model.tokens.bos);
    const answer = [];
    for await (const token of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
        answer.push(token);
        if (answer.length >= Number(count)) break;
    }
    answers.push({ prompt, answer });
    sequence.dispose();
}
process.stdout.write(JSON.stringify(answers));
await llama.dispose();
