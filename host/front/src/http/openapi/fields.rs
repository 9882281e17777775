//! Fields that several endpoints read. Tests compare each field with the code that reads it.

use host_core::radix::NamespaceKey;
use serde_json::{Map, Value, json};

use super::schema::{
    Fields, NOTHING, any_object, boolean, integer, nothing_or, number, only, or, reference, short_text, text,
    token_list,
};
use crate::http::ask::{
    ABSENT, MAX_SESSION, MAX_STOP_BYTES, MAX_STOP_TOKENS, MAX_STOPS, MOST_ANSWERS, MOST_SECONDS,
};
use crate::http::conversation::MOST_MESSAGES;
use crate::http::sampling::{MOST_BIAS, MOST_REPETITION, MOST_TOKENS, MOST_WORD_BYTES, MOST_WORDS};
use crate::http::tools::{FOREIGN, MAX_NAME, MAX_TOOLS};

/// Range of the token counts that a request may give.
pub(super) const TOKENS: std::ops::RangeInclusive<i64> = 1..=u32::MAX as i64;

/// A served name.
pub(super) fn model(names: &[String]) -> Fields {
    let mut fields = Fields::default();
    let names: Vec<Value> = names.iter().map(|name| json!(name)).chain([Value::Null]).collect();
    let schema = json!({"type": ["string", "null"], "enum": names});
    fields.add("model", schema, "A served name. Another one is answered 404");
    fields
}

/// Fields about how tokens are drawn. `seed` is the name of the seed's field.
pub(super) fn sampling(vocabulary: u32, seed: &str) -> Fields {
    let counts = 0..=i64::from(u32::MAX);
    let word = json!({"type": "string", "minLength": 1, "maxLength": MOST_WORD_BYTES, "pattern": "\\S"});
    let biases = json!({
        "type": ["object", "null"],
        "maxProperties": MOST_TOKENS,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number"},
    });
    let mut fields = Fields::default();
    fields
        .add("allowed_token_ids", token_list(MOST_TOKENS, vocabulary), "Other tokens are not drawn")
        .add(
            "bad_words",
            json!({"type": ["array", "null"], "maxItems": MOST_WORDS, "items": word}),
            "Not written, at the beginning of a word or within it",
        )
        .add("min_tokens", or(integer(&counts), 0), "No end token is drawn before. At most the tokens of the answer")
        .add("min_new_tokens", integer(&counts), "The same by SGLang's name")
        .add(
            "logit_bias",
            biases,
            &format!("Added to the logits of these token ids, cut to -{MOST_BIAS} to {MOST_BIAS}"),
        )
        .add(
            "repetition_penalty",
            or(number(0.0, MOST_REPETITION, false), 1),
            "Logits of tokens that the prompt or the answer has are divided by it if positive, else multiplied",
        )
        .add(
            "frequency_penalty",
            or(number(-2.0, 2.0, true), 0),
            "Taken off for each time that the answer has the token",
        )
        .add("presence_penalty", or(number(-2.0, 2.0, true), 0), "Taken off if the answer has the token")
        .add("temperature", or(number(0.0, 2.0, true), 1), "0 takes the likeliest token")
        .add(
            "min_p",
            or(number(0.0, 1.0, true), 0),
            "Tokens that are less likely than this share of the likeliest are not drawn",
        )
        .add(
            "top_k",
            integer(&(-1..=i64::from(u32::MAX))),
            "So many of the likeliest. -1, 0 and no value stand for all",
        )
        .add(
            "top_p",
            or(number(0.0, 1.0, false), 1),
            "The likeliest of those, whose probabilities sum to this",
        )
        .add(seed, integer(&(i64::MIN..=i64::MAX)), "A random one by default, and for -1");
    fields
}

/// Fields about answers, for chats, for responses, and in `sampling_params`.
pub(super) fn answers(vocabulary: u32) -> Fields {
    let stop = json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES});
    let stops =
        json!({"anyOf": [stop, {"type": "array", "maxItems": MAX_STOPS, "items": stop}, {"type": "null"}]});
    let mut fields = Fields::default();
    fields
        .add("n", or(integer(&(1..=MOST_ANSWERS as i64)), 1), "Answers to each prompt")
        .add("stop", stops, "The answer ends before the first of them")
        .add(
            "stop_token_ids",
            token_list(MAX_STOP_TOKENS, vocabulary),
            "The answer ends at one of them, also with ignore_eos",
        )
        .add("include_stop_str_in_output", or(boolean(), false), "What ended the answer is part of its text")
        .add("no_stop_trim", boolean(), "The same by SGLang's name")
        .add("ignore_eos", or(boolean(), false), "The model's own end tokens do not end the answer")
        .add("skip_special_tokens", or(boolean(), true), "False shows special tokens as their names");
    fields
}

/// Fields about how answers are sent.
pub(super) fn stream() -> Fields {
    let mut options = Fields::default();
    options
        .add("include_usage", or(boolean(), false), "Usage comes last")
        .add("continuous_usage_stats", or(boolean(), false), "Usage comes in every event")
        .add("include_obfuscation", boolean(), "Taken and not read: events are not padded");
    let mut options = options.object(&[]);
    options["type"] = json!(["object", "null"]);
    let mut fields = Fields::default();
    fields.add("stream", or(boolean(), false), "Answers come as events").add(
        "stream_options",
        options,
        "Only with stream",
    );
    fields
}

/// Fields about when a request is served, and from which caches.
pub(super) fn serving() -> Fields {
    let mut fields = Fields::default();
    fields
        .add(
            "priority",
            or(integer(&(i64::from(i32::MIN)..=i64::from(i32::MAX))), 0),
            "Smaller numbers go first",
        )
        .add(
            "timeout",
            number(0.0, MOST_SECONDS, false),
            "Seconds from the arrival of the request to the end of its answer",
        )
        .add(
            "cache_salt",
            short_text(NamespaceKey::MAX_PART),
            "Pages are shared only between requests with the same one. Its length counts in bytes",
        )
        .add("extra_key", short_text(NamespaceKey::MAX_PART), "The same, for whatever else must not be mixed")
        .add("no_cache", or(boolean(), false), "Uses no cached page and leaves none")
        .add("session_id", short_text(MAX_SESSION), "Requests of a session stay together")
        .add("prompt_cache_key", json!({}), "The same by OpenAI's name")
        .add(
            "return_cached_tokens_details",
            or(boolean(), false),
            "Adds where the cached tokens of the prompt were",
        );
    fields
}

/// Fields of which at most one may limit the answer.
const STRUCTURE: [&str; 10] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "json_schema",
    "regex",
    "ebnf",
];

/// The values of a field of structure that limit nothing, beside `null`. `{}` is a schema.
fn no_limit(name: &str) -> Value {
    match name {
        "guided_json_object" => only(&[json!(false)]),
        "json_schema" | "regex" | "ebnf" => only(&[json!("")]),
        _ => only(&[]),
    }
}

/// The rule that at most one of these fields limits the answer.
pub(super) fn one_structure() -> Value {
    let plain = json!({"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}});
    let off = nothing_or([plain]);
    let without = |name: &&str| {
        let others = STRUCTURE.iter().filter(|other| *other != name);
        let others: Map<String, Value> = others
            .map(|other| match *other {
                "response_format" => ((*other).to_owned(), off.clone()),
                other => (other.to_owned(), no_limit(other)),
            })
            .collect();
        json!({"properties": others})
    };
    json!({"anyOf": STRUCTURE.iter().map(without).collect::<Vec<Value>>()})
}

/// Fields that limit an answer.
pub(super) fn structure() -> Fields {
    let schema = json!({"type": ["object", "boolean", "string"], "not": {"enum": [false, ""]}});
    let expression = json!({"type": "string", "minLength": 1, "format": "regex"});
    let choice = json!({"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}});
    let rules = json!({"type": "string", "minLength": 1});
    let always = json!({"const": true});
    let kinds = [
        ("json", &schema),
        ("regex", &expression),
        ("choice", &choice),
        ("grammar", &rules),
        ("json_object", &always),
    ];
    let of_kind = |(kind, value): &(&str, &Value)| {
        let mut properties = Map::from_iter([
            ("disable_any_whitespace".to_owned(), boolean()),
            ("disable_additional_properties".to_owned(), only(&[json!(false)])),
            ("disable_fallback".to_owned(), boolean()),
        ]);
        properties.insert((*kind).to_owned(), (*value).clone());
        json!({
            "type": "object",
            "required": [kind],
            "properties": properties,
            "additionalProperties": {"type": "null"},
        })
    };
    let mut outputs: Vec<Value> = kinds.iter().map(of_kind).collect();
    outputs.push(json!({"type": "null"}));
    let outputs = json!({"anyOf": outputs});
    let mut fields = Fields::default();
    fields.add("response_format", format(true), "OpenAI's").add(
        "structured_outputs",
        outputs,
        "vLLM's: one of json, regex, choice, grammar and json_object",
    );
    let old = "vLLM's old spelling";
    for (name, value) in [
        ("guided_json", &schema),
        ("guided_regex", &expression),
        ("guided_choice", &choice),
        ("guided_grammar", &rules),
        ("guided_json_object", &always),
    ] {
        fields.add(name, json!({"anyOf": [no_limit(name), value]}), old);
    }
    fields.add("guided_decoding_backend", json!({}), "Taken and not looked at: there is one engine");
    for (name, value) in [("json_schema", schema), ("regex", expression), ("ebnf", rules)] {
        fields.add(name, json!({"anyOf": [no_limit(name), value]}), "SGLang's. An empty text limits nothing");
    }
    for name in ["guided_whitespace_pattern", "structural_tag"] {
        fields.add(name, nothing_or([]), "");
    }
    fields
}

/// OpenAI's format of an answer. Its schema stands in an object of its own, or beside the type. `nests`: lists the first form
/// first.
pub(super) fn format(nests: bool) -> Value {
    let typed = |kinds: Value, required: Value| json!({"type": "object", "required": required, "properties": {"type": {"enum": kinds}}});
    let schema = json!({"type": ["object", "boolean"]});
    let plain = typed(json!(["text", "json_object"]), json!(["type"]));
    let mut flat = typed(json!(["json_schema"]), json!(["type", "schema"]));
    flat["properties"]["schema"] = schema.clone();
    flat["properties"]["name"] = json!({});
    flat["not"] = json!({"required": ["json_schema"]});
    let mut nested = typed(json!(["json_schema"]), json!(["type", "json_schema"]));
    nested["properties"]["json_schema"] = json!({"type": "object", "required": ["schema"], "properties": {"schema": schema, "name": {}, "strict": {}}});
    let kinds = if nests { [plain, nested, flat] } else { [plain, flat, nested] };
    let kinds: Vec<Value> = [only(&[])].into_iter().chain(kinds).collect();
    json!({"anyOf": kinds})
}

/// Fields of features that this server does not have. They accept only values that change nothing.
pub(super) fn unsupported() -> Fields {
    let mut fields = Fields::default();
    let off = "This server has it not: taken where it changes nothing";
    fields.add("tool_choice", only(&[json!("none"), json!("auto")]), off).add(
        "length_penalty",
        only(&[json!(0), json!(1)]),
        off,
    );
    for name in ABSENT {
        fields.add(name, nothing_or([]), off);
    }
    fields.add("prompt_logprobs", only(&[json!(false)]), off);
    fields.add("detokenize", only(&[json!(true)]), off);
    let kinds = json!({"type": ["array", "null"], "items": {"const": "text"}});
    fields.add("modalities", kinds, off);
    fields
}

/// Fields for tools and for the choice of a tool. `nested`: in the form of chats.
pub(super) fn tools(nested: bool) -> Fields {
    let name =
        json!({"type": "string", "minLength": 1, "maxLength": MAX_NAME, "pattern": "^[A-Za-z0-9_.-]+$"});
    let function = json!({
        "type": "object",
        "required": ["name"],
        "properties": {"name": name, "description": {}, "parameters": any_object()},
    });
    let kind = json!({"const": "function"});
    let (tool, choice) = if nested {
        (
            json!({"type": "object", "required": ["type", "function"], "properties": {"type": kind, "function": function}}),
            json!({
                "type": "object",
                "required": ["function"],
                "properties": {"type": kind, "function": {"type": "object", "required": ["name"], "properties": {"name": name}}},
            }),
        )
    } else {
        let mut tool = function;
        tool["required"] = json!(["type", "name"]);
        tool["properties"]["type"] = kind.clone();
        let dated = json!({"type": "string", "pattern": "^web_search_"});
        let foreign = json!({"anyOf": [{"enum": FOREIGN}, dated]});
        let foreign = json!({"type": "object", "required": ["type"], "properties": {"type": foreign}});
        let namespace = json!({
            "type": "object",
            "required": ["type", "name", "tools"],
            "properties": {
                "type": {"const": "namespace"},
                "name": name,
                "description": {},
                "tools": {"type": "array", "items": tool},
            },
        });
        let tool = json!({"anyOf": [tool, namespace, foreign]});
        (
            tool,
            json!({"type": "object", "required": ["name"], "properties": {"type": kind, "name": name, "namespace": name}}),
        )
    };
    let words = json!({"enum": ["none", "auto", "required", "any"]});
    let mut fields = Fields::default();
    fields
        .add(
            "tools",
            nothing_or([json!({"type": "array", "maxItems": MAX_TOOLS, "items": tool})]),
            "They are part of the prompt. Each has another name",
        )
        .add(
            "tool_choice",
            nothing_or([words, choice]),
            "Auto by default. A name is that of one of the tools",
        )
        .add("parallel_tool_calls", or(boolean(), true), "False passes one call on");
    fields
}

/// Fields of a conversation.
pub(super) fn messages() -> Fields {
    let mut fields = Fields::default();
    fields
        .add(
            "messages",
            json!({"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": reference("Message")}),
            "",
        )
        .add("add_generation_prompt", boolean(), "False leaves the assistant's turn out")
        .add("chat_template_kwargs", any_object(), "Variables of the template")
        .add("enable_thinking", boolean(), "A variable of the template")
        .add("thinking", thinking(), "Sets the variables enable_thinking and thinking")
        .add("reasoning_effort", text(), "Reaches the template. None switches thoughts off");
    fields
}

/// Whether thoughts are wanted, as an object.
pub(super) fn thinking() -> Value {
    let words = json!({"type": ["string", "null"], "enum": ["enabled", "disabled", null]});
    let object =
        json!({"type": "object", "properties": {"type": words}, "additionalProperties": reference(NOTHING)});
    json!({"anyOf": [object, reference(NOTHING)]})
}
