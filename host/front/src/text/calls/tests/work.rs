//! Reading an answer takes work in proportion to its length.

use super::{CallFormat, read};
use crate::text::work::steps;

/// An answer: a beginning, a text that is repeated, and one that is repeated as often behind it.
type Attack = (CallFormat, &'static str, &'static str, &'static str);

#[test]
fn twice_the_answer_takes_twice_the_work() {
    use CallFormat::{FunctionGemma, Gemma, Hermes, Llama, Pythonic, Qwen3Coder};
    const HERMES_CALL: &str = "<tool_call>{\"name\": \"f\", \"arguments\": {}}";
    const QWEN_LIST: &str = "<tool_call><function=f><parameter=list>";
    const MARK: &str = "<start_function_call>";
    const ARGUMENTS: &str = "<start_function_call>call:f{";
    let attacks: [Attack; 74] = [
        (Hermes, "", " ", ""),
        (Hermes, "", " <tool_cal", ""),
        (Hermes, "", "<", ""),
        (Hermes, "", "<tool_call>", ""),
        (Hermes, "", "<tool_call> ", ""),
        (Hermes, "", "<tool_call>{}", ""),
        (Hermes, "", "<tool_call>{\"no\": 1}", ""),
        (Hermes, "", "<tool_call>{\"no\": \"", ""),
        (Hermes, "<tool_call>{\"", "<tool_call>{\",\":\"", ""),
        (Hermes, "", "<tool_call>{\"no\":[", "]}"),
        (Hermes, "", "<tool_call>{", ""),
        (Hermes, "", "<tool_call>{", "}"),
        (Hermes, "", "<tool_call>{\"", "}"),
        (Hermes, "", "<tool_call>{\"", "\"}"),
        (Hermes, "", HERMES_CALL, ""),
        (Hermes, HERMES_CALL, " ", ""),
        (Hermes, "<tool_call>", " ", ""),
        (Hermes, "<tool_call>{", " ", ""),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\":", " ", ""),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {", "[", ""),
        (Llama, "", " ", ""),
        (Llama, "<|python_tag|>", " ", ""),
        (Llama, "", "<|python_tag|>", ""),
        (Llama, "{\"name\": \"f\"}", " ", ""),
        (Llama, "{\"name\": \"f\"};", " ", ""),
        (Llama, "", "{\"name\": \"f\"};", ""),
        (Llama, "{\"name\": \"f\", \"parameters\":", " ", ""),
        (Pythonic, "", " ", ""),
        (Pythonic, "<|python_start|>", " ", ""),
        (Pythonic, "[", " ", ""),
        (Pythonic, "[f", " ", ""),
        (Pythonic, "[f(", " ", ""),
        (Pythonic, "[f()", " ", ""),
        (Pythonic, "[f(),", " ", ""),
        (Pythonic, "[f()]", " ", ""),
        (Pythonic, "[f()]<|python_end|>", " ", ""),
        (Pythonic, "[", "f(count=1), ", ""),
        (Pythonic, "[f(", "[", "]"),
        (Qwen3Coder, "", " ", ""),
        (Qwen3Coder, "", "<tool_call>", ""),
        (Qwen3Coder, "", "<function=", ""),
        (Qwen3Coder, "", "<tool_call><function=f></function>", ""),
        (Qwen3Coder, "<tool_call><function=f></function>", " ", ""),
        (Qwen3Coder, "<tool_call><function=f>", "<parameter=", ""),
        (Qwen3Coder, "<tool_call><function=f>", "<", ""),
        (Qwen3Coder, QWEN_LIST, " ", ""),
        (Qwen3Coder, QWEN_LIST, "</parameter", ""),
        (Qwen3Coder, "<tool_call><function=f><parameter=text>", "\n", ""),
        (Gemma, "", " ", ""),
        (Gemma, "", "`", ""),
        (Gemma, "", "```tool_cod", ""),
        (Gemma, "", "```tool_code", ""),
        (Gemma, "", "```tool_code f(", ""),
        (Gemma, "", "```tool_code f(", ")"),
        (Gemma, "", "```tool_code f(1)", ""),
        (Gemma, "", "```tool_code f()```", ""),
        (Gemma, "", "```tool_code [", ""),
        (Gemma, "```tool_code", " ", ""),
        (Gemma, "```tool_code", "[", ""),
        (Gemma, "```tool_code f", " ", ""),
        (Gemma, "```tool_code", " f(count=1)", ""),
        (Gemma, "```tool_code f()", " ", ""),
        (FunctionGemma, "", " ", ""),
        (FunctionGemma, "", "<start_functio", ""),
        (FunctionGemma, "", MARK, ""),
        (FunctionGemma, "", "<start_function_call>call:f", ""),
        (FunctionGemma, "", ARGUMENTS, ""),
        (FunctionGemma, "", ARGUMENTS, "}"),
        (FunctionGemma, MARK, " ", ""),
        (FunctionGemma, "<start_function_call>call:", "f", ""),
        (FunctionGemma, ARGUMENTS, "<", ""),
        (FunctionGemma, ARGUMENTS, "<escape>", ""),
        (FunctionGemma, ARGUMENTS, "a:1,", ""),
        (FunctionGemma, "<start_function_call>call:f{}", " ", ""),
    ];
    let mut slow = Vec::new();
    for (format, before, unit, after) in attacks {
        let work = |bytes: usize, in_letters: bool| {
            let count = bytes / (unit.len() + after.len());
            let answer = before.to_owned() + &unit.repeat(count) + &after.repeat(count);
            let pieces = if in_letters { answer.split("").collect() } else { vec![answer.as_str()] };
            steps(|| read(format, &pieces)).0
        };
        for in_letters in [false, true] {
            let [once, twice] = [20_000, 40_000].map(|bytes| work(bytes, in_letters));
            // A kilobyte in which a call may begin is read again with each letter, and half a kilobyte for each argument without a
            // name.
            let (letters, most) = if in_letters { ("in letters", 700) } else { ("whole", 60) };
            if twice > 2 * once + once / 4 || once > most * 20_000 {
                slow.push(format!("{format:?} {before}{unit}{after} {letters}: {once}, then {twice} steps"));
            }
        }
    }
    assert!(slow.is_empty(), "{slow:#?}");
}
