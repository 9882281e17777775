//! Schemas of the bodies of requests.

use serde_json::{Value, json};

use super::fields::{
    TOKENS, answers, format, messages, model, one_structure, sampling, serving, stream, structure, thinking,
    tools, unsupported,
};
use super::schema::{
    Fields, any_object, boolean, integer, nothing, nothing_or, number, only, or, reference, text, token,
    token_list,
};
use super::{About, schema};
use crate::http::ask::MOST_ANSWERS;
use crate::http::generate::SAMPLING;
use crate::http::tokens::MOST_TOKENS;
use crate::http::{completions, generate};

/// The schemas of all bodies and of their parts, with their names.
pub(super) fn all(about: &About) -> Vec<(&'static str, Value)> {
    vec![
        (schema::NOTHING, nothing()),
        (ONE_STRUCTURE, one_structure()),
        ("Message", message()),
        ("Item", item()),
        ("ChatCompletionRequest", chat(about)),
        ("CompletionRequest", completion(about)),
        ("ResponseRequest", response(about)),
        ("GenerateRequest", generate(about)),
        ("SamplingParams", sampling_params(about)),
        ("TokenizeRequest", tokenize(about)),
        ("DetokenizeRequest", detokenize(about)),
    ]
}

/// A text, or a list of parts with texts.
fn content(kinds: &[&str]) -> Value {
    let part = json!({
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": kinds}, "text": {"type": "string"}},
    });
    json!({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]})
}

fn message() -> Value {
    let roles = ["system", "developer", "user", "tool"];
    let mut of_assistant = content(&["text"]);
    if let Some(kinds) = of_assistant["anyOf"].as_array_mut() {
        kinds.push(json!({"type": "null"}));
    }
    // Arguments are an object, or a text with its JSON. Absent arguments are an empty object.
    let function = json!({
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
    });
    let call = json!({
        "type": "object",
        "required": ["function"],
        "properties": {"id": {}, "type": {}, "function": function},
    });
    let tool_calls = json!({"anyOf": [{"type": "array", "items": call}, {"type": "null"}]});
    json!({"anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": roles}, "content": content(&["text"]), "tool_call_id": {}},
        },
        {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {"const": "assistant"}, "content": of_assistant, "reasoning_content": {}, "tool_calls": tool_calls},
        },
    ]})
}

fn chat(about: &About) -> Value {
    let mut fields = model(&about.models);
    fields
        .extend(messages())
        .add("add_special_tokens", only(&[json!(false)]), "A template writes the special tokens itself")
        .add("max_tokens", integer(&TOKENS), "By default what --default-max-tokens or the context leaves")
        .add("max_completion_tokens", integer(&TOKENS), "The same. It wins over max_tokens")
        .extend(answers(about.vocabulary))
        .add("logprobs", or(boolean(), false), "Log probabilities of the tokens")
        .add("top_logprobs", or(integer(&(0..=20)), 0), "The likeliest tokens in each place. Needs logprobs")
        .add("include_reasoning", or(boolean(), true), "Whether thoughts are part of the answer")
        .add("separate_reasoning", or(boolean(), true), "Whether thoughts are apart from the text")
        .add(
            "stream_reasoning",
            or(boolean(), true),
            "Whether thoughts are streamed as they come, or when they are complete",
        )
        .extend(stream())
        .extend(sampling(about.vocabulary, "seed"))
        .extend(serving())
        .extend(structure())
        .extend(unsupported())
        .extend(tools(true));
    with_tools(streamed(fields.object(&["messages"])))
}

fn completion(about: &About) -> Value {
    let text = json!({"type": "string", "minLength": about.least_text});
    let tokens = json!({"type": "array", "minItems": 1, "items": token(about.vocabulary)});
    let several =
        json!({"type": "array", "minItems": 1, "maxItems": MOST_ANSWERS, "items": {"anyOf": [text, tokens]}});
    let mut fields = model(&about.models);
    fields
        .add("prompt", json!({"anyOf": [text, tokens, several]}), "A text, token ids, or a list of either")
        .add(
            "add_special_tokens",
            or(boolean(), true),
            "A text gets the special tokens that the model begins with",
        )
        .add(
            "echo",
            or(boolean(), false),
            "The answer begins with the prompt. logprobs are those of its tokens, too",
        )
        .add(
            "max_tokens",
            or(integer(&(0..=*TOKENS.end())), completions::DEFAULT_MAX_TOKENS),
            "0 with echo only",
        )
        .extend(answers(about.vocabulary))
        .add(
            "best_of",
            integer(&(1..=MOST_ANSWERS as i64)),
            "From n on: so many are computed, and the likeliest n are returned. Not with stream",
        )
        .add("logprobs", integer(&(0..=5)), "Log probabilities of the tokens")
        .extend(stream())
        .extend(sampling(about.vocabulary, "seed"))
        .extend(serving())
        .extend(structure())
        .extend(unsupported());
    streamed(fields.object(&["prompt"]))
}

/// Name of the schema that allows at most one field of structure.
const ONE_STRUCTURE: &str = "OneStructure";

/// Adds two rules to a body: at most one structure, and `stream_options` only with `stream`.
fn streamed(mut body: Value) -> Value {
    body["allOf"] = json!([reference(ONE_STRUCTURE), {
        "if": {"properties": {"stream_options": {"type": "object"}}, "required": ["stream_options"]},
        "then": {"properties": {"stream": {"const": true}}, "required": ["stream"]},
    }]);
    body
}

/// Adds a rule to a body: a demanded call needs at least one tool.
fn with_tools(mut body: Value) -> Value {
    let named = json!({"anyOf": [{"type": "object", "minProperties": 1}, {"const": "any"}]});
    if let Some(rules) = body["allOf"].as_array_mut() {
        rules.push(json!({
            "if": {"properties": {"tool_choice": named}, "required": ["tool_choice"]},
            "then": {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
        }));
    }
    body
}

fn item() -> Value {
    let parts = content(&["input_text", "output_text", "text"]);
    let id = json!({"type": "string", "minLength": 1});
    let object = |required: Value, properties: Value| json!({"type": "object", "required": required, "properties": properties});
    let roles = json!({"enum": ["system", "developer", "user", "assistant"]});
    json!({"anyOf": [
        object(json!(["role", "content"]), json!({"type": {"const": "message"}, "role": roles, "content": parts})),
        object(
            json!(["type", "call_id", "name"]),
            json!({
                "type": {"const": "function_call"},
                "call_id": id,
                "namespace": text(),
                "name": id,
                "arguments": {"description": "A JSON object, as text", "anyOf": [any_object(), {"type": "string"}]},
            }),
        ),
        object(
            json!(["type", "call_id", "output"]),
            json!({"type": {"const": "function_call_output"}, "call_id": id, "output": parts}),
        ),
        object(json!(["type"]), json!({"type": {"const": "reasoning"}, "content": {}, "summary": {}})),
        object(json!(["type"]), json!({"type": {"type": "string", "pattern": "^(web_search(_[a-z0-9_]+)?|tool_search|image_generation)_(call|output)$"}})),
    ]})
}

fn response(about: &About) -> Value {
    let mut reasoning = Fields::default();
    reasoning
        .add("effort", text(), "Reaches the template. None switches thoughts off")
        .add("summary", text(), "")
        .add("generate_summary", text(), "");
    let mut words = Fields::default();
    words.add("format", format(false), "").add("verbosity", text(), "Taken and not read");
    let nullable = |fields: Fields| {
        let mut object = fields.object(&[]);
        object["type"] = json!(["object", "null"]);
        object
    };
    let included = json!({"anyOf": [
        {"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
        {"type": "string", "pattern": "^(web_search|tool_search|image_generation)_call\\."},
    ]});
    let mut fields = model(&about.models);
    fields
        .add(
            "input",
            json!({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": reference("Item")}]}),
            "The whole conversation",
        )
        .add("instructions", text(), "A system message before the input")
        .add("max_output_tokens", integer(&TOKENS), "")
        .extend(answers(about.vocabulary))
        .add("n", only(&[json!(1)]), "")
        .extend(stream())
        .extend(sampling(about.vocabulary, "seed"))
        .extend(serving())
        .extend(structure())
        .add("response_format", nothing_or([]), "text.format has its place")
        .add("text", nullable(words), "How the answer is written")
        .add("reasoning", nullable(reasoning), "How much is thought")
        .extend(tools(false))
        .add("chat_template_kwargs", any_object(), "Variables of the template")
        .add("enable_thinking", boolean(), "A variable of the template")
        .add("thinking", thinking(), "Sets the variables enable_thinking and thinking")
        .add("include", json!({"type": ["array", "null"], "items": included}), "")
        .add("top_logprobs", or(integer(&(0..=20)), 0), "The likeliest tokens in each place")
        .add("truncation", only(&[json!("disabled")]), "")
        .add("max_tool_calls", integer(&(0..=i64::MAX)), "Taken and not read");
    for name in ["previous_response_id", "conversation", "background", "prompt"] {
        fields.add(name, nothing_or([]), "This server keeps nothing");
    }
    with_tools(streamed(fields.object(&["input"])))
}

fn sampling_params(about: &About) -> Value {
    let mut fields = Fields::default();
    fields
        .add("max_new_tokens", or(integer(&TOKENS), generate::DEFAULT_MAX_TOKENS), "")
        .extend(answers(about.vocabulary))
        .extend(sampling(about.vocabulary, "sampling_seed"))
        .extend(structure())
        .extend(unsupported());
    let mut params = fields.object(&[]);
    params["allOf"] = json!([reference(ONE_STRUCTURE)]);
    params
}

fn generate(about: &About) -> Value {
    let text = json!({"type": "string", "minLength": about.least_text});
    let texts = json!({"type": "array", "minItems": 1, "maxItems": MOST_ANSWERS, "items": text});
    let tokens = json!({"type": "array", "minItems": 1, "items": token(about.vocabulary)});
    let lists = json!({"type": "array", "minItems": 1, "maxItems": MOST_ANSWERS, "items": tokens});
    let params = reference("SamplingParams");
    let mut fields = Fields::default();
    fields
        .add("text", json!({"anyOf": [text, texts, {"type": "null"}]}), "A text, or a list of texts")
        .add("input_ids", json!({"anyOf": [tokens, lists, {"type": "null"}]}), "In the place of text")
        .add(
            "sampling_params",
            json!({"anyOf": [params, {"type": "array", "minItems": 1, "maxItems": MOST_ANSWERS, "items": params}, {"type": "null"}]}),
            "One object, or one for each prompt",
        )
        .add("rid", json!({}), "A text of at most 256 bytes, or one for each prompt. Comes back as meta_info.id")
        .add("stream", or(boolean(), false), "Answers come as events. Each repeats the answer so far")
        .add("return_logprob", or(boolean(), false), "")
        .add("top_logprobs_num", or(integer(&(0..=20)), 0), "")
        .add(
            "logprob_start_len",
            or(integer(&(-1..=i64::from(u32::MAX))), -1),
            "With return_logprob, the prompt's tokens from here on have theirs, too. -1: none",
        )
        .extend(serving());
    for name in [
        "input_embeds",
        "image_data",
        "audio_data",
        "video_data",
        "lora_path",
        "session_params",
        "token_ids_logprob",
        "bootstrap_host",
        "bootstrap_room",
    ] {
        fields.add(name, nothing_or([]), "This server has it not");
    }
    for name in SAMPLING {
        fields.add(name, json!({"type": "null"}), "Belongs into sampling_params");
    }
    let mut body = fields.object(&[]);
    let one = |name: &str, other: &str, kinds: Value| json!({"required": [name], "properties": {name: {"type": kinds}, other: {"type": "null"}}});
    body["oneOf"] = json!([
        one("text", "input_ids", json!(["string", "array"])),
        one("input_ids", "text", json!(["array"])),
    ]);
    body
}

fn tokenize(about: &About) -> Value {
    let texts = json!({"type": "array", "maxItems": MOST_ANSWERS, "items": {"type": "string"}});
    let conversation =
        json!({"anyOf": [{"type": "array", "items": reference("Message")}, reference(schema::NOTHING)]});
    let mut fields = model(&about.models);
    fields
        .add(
            "prompt",
            json!({"anyOf": [{"type": "string"}, texts, {"type": "null"}]}),
            "A text, or a list of texts",
        )
        .extend(messages())
        .add("messages", conversation, "In the place of prompt")
        .add("add_special_tokens", boolean(), "By default true for texts, false for messages")
        .add("return_token_strs", or(boolean(), false), "")
        .extend(tools(true))
        .add("continue_final_message", nothing_or([]), "");
    let mut body = fields.object(&[]);
    let off = reference(schema::NOTHING);
    body["oneOf"] = json!([
        {
            "required": ["prompt"],
            "properties": {
                "prompt": {"type": ["string", "array"]},
                "messages": off,
                "tools": off,
                "add_generation_prompt": off,
                "chat_template_kwargs": off,
                "enable_thinking": off,
                "thinking": off,
                "reasoning_effort": off,
            },
        },
        {
            "required": ["messages"],
            "properties": {"prompt": {"type": "null"}, "messages": {"type": "array", "minItems": 1}},
        },
    ]);
    body["allOf"] = json!([]);
    with_tools(body)
}

fn detokenize(about: &About) -> Value {
    let mut tokens = token_list(MOST_TOKENS, about.vocabulary);
    tokens["type"] = json!("array");
    let mut fields = model(&about.models);
    fields.add("tokens", tokens, "").add(
        "skip_special_tokens",
        boolean(),
        "By default the answer's prompt has special tokens, and its text has none",
    );
    fields.object(&["tokens"])
}

/// Schema of the header with the time limit of a request.
pub(super) fn seconds() -> Value {
    let mut seconds = number(0.0, crate::http::ask::MOST_SECONDS, false);
    seconds["type"] = json!("number");
    seconds
}
