//! Texts that a wrong tokenizer cuts differently.

/// Written by hand: languages, code, numbers, spaces, contractions, characters of many bytes, texts of special tokens.
const WRITTEN: &[&str] = &[
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    "\t\t x",
    " \n \n  ",
    "a",
    " a",
    "a ",
    "a  b   c    d",
    "Hello, world!",
    "The capital of France is Paris.",
    "I'm sure it's what they'll say; we've DON'T I'D y'all 'tis 'S 'Ll",
    "Straße, Größe, ÄÖÜ äöü ß – „Anführung“ … naïve café",
    "e\u{301}tude cafe\u{301} A\u{30a} ﬁ ½ ² Å",
    "東京都の人口は約1400万人です。こんにちは、世界！カタカナ",
    "中文分词测试：你好，世界。",
    "한국어 문장도 있습니다.",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "ภาษาไทย",
    "👍 🤖🦀 👩‍👩‍👧‍👦 🇩🇪 ☺️",
    "\u{200b}zero\u{200d}width\u{feff}",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎",
    "\u{fffd}\u{fffd} \u{1}\u{7f}\u{0}\u{85}\u{a0}x\u{3000}y",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F ²³ ٣٤ Ⅷ",
    "2024-01-31T23:59:59Z +49 (0)30 123-456",
    "fn main() {\n    println!(\"{}\", 1 + 2);\n}\n",
    "def f(x):\n\treturn {k: v for k, v in x.items()}  # note\n\n\n",
    "    indented\n        more\n            and more",
    "<html><body class=\"a\">x &lt; y</body></html></s><s>",
    "SELECT * FROM t WHERE a='b' AND c<>d;--",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\"}}",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "!!!???...,,,---===***///\\\\\\",
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case iPhone NASA's",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                                                        wide",
    "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n",
    "x\u{2581}y",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<s>[INST] Hi [/INST]</s>",
    "<|endoftext|><think>\n</think><tool_call>{}</tool_call>",
    "<|im_start|<|im_end|>| <im_end> <|IM_END|> <start_of_turn",
    "<unk><pad><mask><unused7><0x0A><0x41>",
];

/// Pieces that are joined into texts.
const PIECES: &[&str] = &[
    "a", "B", "the", " the", "ing", "ß", "é", "e\u{301}", "漢", "の", "한", "я", "ا", "👍", "🇩🇪", "1", "23",
    "4567", "²", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "'s", "'LL", "'", "\"", ".", ",", "!", "...",
    "-", "_", "/", "\\", "<", ">", "</b>", "{", "}", "(", ")", "+", "=", "==", "$", "€", "@", "#", "~", "^",
    "|", "`", "\u{a0}", "\u{200d}", "World", " World", "http://", ";",
];

/// A few hundred texts, the same every time.
pub fn varied() -> Vec<String> {
    let mut state = 20_u32;
    let mut next = |bound: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 12) as usize % bound
    };
    let mut texts: Vec<String> = WRITTEN.iter().map(ToString::to_string).collect();
    for _ in 0..350 {
        let length = 1 + next(14);
        texts.push((0..length).map(|_| PIECES[next(PIECES.len())]).collect());
    }
    texts.push(WRITTEN.join(" "));
    texts
}
