//! The requests of a run, drawn from its seed.

use serde_json::{Value, json};

use super::{Endpoint, Job, Model};

/// Number of different requests.
const JOBS: usize = 64;
/// Token ids that all models have.
const VOCABULARY: std::ops::Range<u32> = 0..256;
/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Greedy,
    Seeded,
    Unseeded,
    Penalized,
    Candidates,
    Completion,
    Scored,
    Chat,
    Schema,
    Expression,
    Tool,
}

/// All kinds, each with its weight in the draw, whether only a real model answers it, and its name in the report.
const KINDS: &[(Kind, usize, bool, &str)] = &[
    (Kind::Greedy, 4, false, "greedy"),
    (Kind::Seeded, 4, false, "drawn with a seed"),
    (Kind::Unseeded, 2, false, "drawn without a seed"),
    (Kind::Penalized, 2, false, "with penalties, a bias and a least probability"),
    (Kind::Candidates, 2, false, "of several candidates"),
    (Kind::Completion, 2, false, "completions of a text"),
    (Kind::Scored, 2, false, "with the log probabilities of the prompt"),
    (Kind::Chat, 4, true, "chats"),
    (Kind::Schema, 4, true, "chats held to a JSON schema"),
    (Kind::Expression, 3, true, "held to a regular expression"),
    (Kind::Tool, 3, true, "chats that must call a tool"),
];

/// Draws the requests of a run.
#[must_use]
pub fn draw(random: &mut fastrand::Rng, model: Model) -> Vec<Job> {
    let beginnings: Vec<Vec<u32>> = (0..6).map(|_| tokens(random, 400)).collect();
    let is_possible = |needs_model: bool| !needs_model || model.has_vocabulary();
    let possible: Vec<_> = KINDS.iter().filter(|(_, _, needs_model, _)| is_possible(*needs_model)).collect();
    let weights: usize = possible.iter().map(|(_, weight, ..)| weight).sum();
    // Each kind comes as often as its weight says, so that no seed leaves one out.
    let mut jobs = Vec::new();
    for (kind, weight, _, name) in possible {
        for _ in 0..(JOBS * weight).div_ceil(weights) {
            jobs.push(job(random, *kind, name, &beginnings));
        }
    }
    jobs
}

fn tokens(random: &mut fastrand::Rng, most: usize) -> Vec<u32> {
    (0..random.usize(1..most)).map(|_| random.u32(VOCABULARY)).collect()
}

fn text(random: &mut fastrand::Rng) -> String {
    let words = ["one", "page", "of", "the", "river", "goes", "to", "every", "town", "and", "back", "again"];
    (0..random.usize(5..80)).map(|_| *random.choice(&words).unwrap_or(&"")).collect::<Vec<_>>().join(" ")
}

fn job(random: &mut fastrand::Rng, kind: Kind, name: &'static str, beginnings: &[Vec<u32>]) -> Job {
    let mut prompt = random.choice(beginnings).cloned().unwrap_or_default();
    prompt.extend(tokens(random, 200));
    let count = random.u32(1..150);
    let seed = random.u32(..);
    let free = json!({"temperature": 0.9, "top_p": 0.95});
    let seeded = with(&free, json!({"sampling_seed": seed}));
    let generate = |settings: &Value| {
        let length = json!({"max_new_tokens": count, "ignore_eos": true});
        json!({"input_ids": prompt, "sampling_params": with(settings, length)})
    };
    let chat = |random: &mut fastrand::Rng, more: Value| {
        let messages =
            json!([{"role": "system", "content": "Answer."}, {"role": "user", "content": text(random)}]);
        let settings = json!({"messages": messages, "temperature": 0.8, "seed": seed, "max_tokens": 250});
        (Endpoint::Chat, with(&settings, more))
    };
    let (endpoint, body) = match kind {
        Kind::Greedy => (Endpoint::Generate, generate(&json!({"temperature": 0}))),
        Kind::Seeded => (Endpoint::Generate, generate(&seeded)),
        Kind::Unseeded => (Endpoint::Generate, generate(&free)),
        Kind::Penalized => {
            let more = json!({
                "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_p": 0.01,
                "logit_bias": {"7": 2.0, "9": -3.0}
            });
            (Endpoint::Generate, generate(&with(&seeded, more)))
        }
        Kind::Candidates => {
            let several = json!({"n": random.u32(2..5)});
            (Endpoint::Generate, generate(&with(&seeded, several)))
        }
        Kind::Completion => {
            let settings = json!({"prompt": text(random), "temperature": 0.9, "seed": seed, "n": 2});
            let length = json!({"max_tokens": count, "ignore_eos": true});
            (Endpoint::Completions, with(&settings, length))
        }
        Kind::Scored => {
            let settings =
                json!({"prompt": prompt, "temperature": 0.9, "seed": seed, "echo": true, "logprobs": 2});
            let length = json!({"max_tokens": count, "ignore_eos": true});
            (Endpoint::Completions, with(&settings, length))
        }
        Kind::Chat => chat(random, json!({"ignore_eos": true, "frequency_penalty": 0.2})),
        Kind::Schema => {
            let schema = json!({
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 30},
                    "count": {"type": "integer", "minimum": 0, "maximum": 100_000},
                    "kind": {"enum": ["page", "river", format!("town {seed}")]},
                    "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 30}
                },
                "required": ["name", "count", "kind", "marks"],
                "additionalProperties": false
            });
            let format = json!({"type": "json_schema", "json_schema": {"name": "entry", "strict": true, "schema": schema}});
            chat(random, json!({"response_format": format}))
        }
        Kind::Expression => {
            let expression = format!("([a-z]{{3,9}} ){{20,60}}{seed}");
            let settings = with(&seeded, json!({"regex": expression, "max_new_tokens": 250}));
            (Endpoint::Generate, json!({"input_ids": prompt, "sampling_params": settings}))
        }
        Kind::Tool => {
            let parameters = json!({
                "type": "object",
                "properties": {
                    "town": {"type": "string", "minLength": 10, "maxLength": 60},
                    "days": {"type": "integer", "minimum": 1, "maximum": 900}
                },
                "required": ["town", "days"],
                "additionalProperties": false
            });
            let function =
                json!({"name": "weather", "description": "Weather of a town.", "parameters": parameters});
            let tools = json!([{"type": "function", "function": function}]);
            chat(random, json!({"tools": tools, "tool_choice": "required"}))
        }
    };
    let is_unseeded = kind == Kind::Unseeded;
    Job { kind: name, endpoint, body, is_unseeded, events: count as usize, right: None }
}

/// An object with the fields of both.
fn with(object: &Value, more: Value) -> Value {
    let mut object = object.clone();
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}
