// Compile texts of Flux (a JSON list on standard input) with InfluxData's own compiler, and print which of them are valid.
// Its package is made for bundlers: it imports the WebAssembly that imports it. Here the glue is given the program afterwards.
import fs from 'node:fs';

const folder = process.argv[2];
const program = fs.readFileSync(`${folder}/flux-lsp-browser_bg.wasm`);
const source = fs.readFileSync(`${folder}/flux-lsp-browser_bg.js`, 'utf8');
const views = [...source.matchAll(/^cached\w+ = new \w+\(wasm\.memory\.buffer\);$/gm)].map((found) => found[0]);
const glue = views.reduce((text, view) => text.replace(`\n${view}`, ''), source.replace(/^import .*$/m, 'let wasm;'));
const begin = `\nexport function begin(exports) { wasm = exports; ${views.join(' ')} }\n`;
const flux = await import(`data:text/javascript;base64,${Buffer.from(glue + begin).toString('base64')}`);
const { instance } = await WebAssembly.instantiate(program, { './flux-lsp-browser_bg.js': flux });
flux.begin(instance.exports);
instance.exports.__wbindgen_start?.();
const texts = JSON.parse(fs.readFileSync(0, 'utf8'));
console.log(JSON.stringify(texts.map((text) => new flux.Flux(text).is_valid())));
