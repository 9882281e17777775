//! Settings of requests over every arrangement of workers: tokens, texts and log probabilities are the same.

use std::path::Path;

use host_tests::caches::{LOADED, RESTORES};
use host_tests::cluster::{Cluster, Start, signal};
use host_tests::fetched::Artifact;
use host_tests::model::tiny_qwen3;
use host_tests::streaming::Events;
use host_tests::{plugin_files, streaming};
use serde_json::{Value, json};

/// Flags of a pool that is too small for all requests at once.
pub(super) const TINY_POOL: [&str; 8] =
    ["--pool-pages", "24", "--reserved-decode-tokens", "8", "--max-batch", "16", "--chunk-tokens", "32"];
/// The same for short answers: each gets one more page while it is written.
const TINIEST_POOL: [&str; 8] =
    ["--pool-pages", "16", "--reserved-decode-tokens", "1", "--max-batch", "16", "--chunk-tokens", "32"];
/// Flags of workers that speculate.
const SPECULATES: [&str; 2] = ["--speculate", "ngram"];
/// Flags of workers that keep KV, on the device and in host memory.
const CACHES: [&str; 3] = ["--decode-radix-cache", "--prefill-radix-cache", "--hierarchical-cache"];
/// Flags of one worker for everything.
const ALONE: [&str; 2] = ["--role", "aggregated"];

/// An executor with its model, and how requests are made for it.
pub(super) struct Computes {
    flags: Vec<String>,
    plugins: &'static [&'static str],
    /// Tokens of an answer.
    tokens: usize,
    /// A special token that ends no answer, and its name in a text. The name is empty if the token is never drawn.
    special: (u32, &'static str),
    /// Whether it takes requests with a grammar.
    grammars: bool,
    /// Whether it computes so slowly that it gets fewer requests.
    slow: bool,
    prompt: fn(usize) -> Value,
    _model: Option<tempfile::TempDir>,
}

/// Made-up tokens.
fn ids(request: usize) -> Value {
    (0..40 + request % 17).map(|token| 33 + (token * 7 + request) % 90).collect()
}

/// A body for `/generate` with a prompt or a list of prompts: texts, or lists of ids.
fn asking(prompts: &Value) -> Value {
    let is_text = prompts.is_string() || prompts[0].is_string();
    let name = if is_text { "text" } else { "input_ids" };
    json!({name: prompts})
}

/// A text that repeats itself, so that its continuation can be guessed.
fn counted(request: usize) -> Value {
    json!(format!("Boat {request}: {}one, two,", "one, two, three, ".repeat(2 + request % 4)))
}

impl Computes {
    pub(super) fn synthetic() -> Self {
        Self {
            flags: vec!["--executor".into(), "synthetic".into()],
            plugins: &["shm", "memory"],
            tokens: 60,
            special: (256, ""),
            grammars: false,
            slow: false,
            prompt: ids,
            _model: None,
        }
    }

    pub(super) fn tiny_model() -> Self {
        let folder = tempfile::tempdir().unwrap();
        tiny_qwen3(folder.path(), 7).unwrap();
        Self {
            flags: vec!["--model".into(), folder.path().display().to_string()],
            special: (557, "<|im_start|>"),
            grammars: true,
            _model: Some(folder),
            ..Self::synthetic()
        }
    }

    /// SmolLM2-135M-Instruct. `<|im_end|>` is the token behind this one.
    fn real_model() -> Self {
        Self {
            flags: vec!["--model".into(), Artifact::SmolLm2.path().display().to_string()],
            plugins: &["shm", "hicache-file"],
            tokens: 14,
            special: (1, "<|im_start|>"),
            grammars: true,
            slow: true,
            prompt: counted,
            ..Self::synthetic()
        }
    }

    pub(super) fn start(&self, flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
        let plugins = plugin_files::directory(self.plugins);
        let mut all = self.flags.clone();
        all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
    }

    /// Each setting greedy and drawn, and all together: `sampling_params` of requests with one answer. With a slow executor each is
    /// one or the other.
    fn settings(&self) -> Vec<Value> {
        let (special, _) = self.special;
        let mut each = vec![
            json!({"presence_penalty": 1.5}),
            json!({"frequency_penalty": 0.8}),
            json!({"repetition_penalty": 1.7}),
            json!({"logit_bias": {"70": 3.5, "71": -100, "72": 2}}),
            json!({"allowed_token_ids": [65, 66, 67, 68, 69, 70, 71, 72]}),
            // With two letters, the same sequences repeat often enough to be guessed, and many guesses are wrong.
            json!({"allowed_token_ids": [65, 66]}),
            json!({"min_tokens": self.tokens * 2 / 3, "stop_token_ids": (32..127).step_by(3).collect::<Vec<u32>>()}),
            json!({"min_p": 0.4}),
            json!({"bad_words": ["e", "a", "th", "in", "one", "7"]}),
            // The first two are forbidden only where the second letter would follow.
            json!({"bad_words": ["AB", "CA", "D"], "allowed_token_ids": [65, 66, 67, 68]}),
            json!({"stop": ["e", "a", "o", "7", "K", "("]}),
            json!({"stop": ["ABBA", "BAAB", "AAAA"], "allowed_token_ids": [65, 66], "include_stop_str_in_output": true}),
            json!({"allowed_token_ids": [65, special], "logit_bias": {special.to_string(): 60}, "frequency_penalty": 2,
                "skip_special_tokens": false}),
        ];
        if self.grammars {
            each.extend(self.shaped_grammars());
        }
        let mut all = Vec::new();
        for (number, setting) in each.iter().enumerate() {
            let both = [0.0, 1.0];
            let temperatures = if self.slow { &both[number % 2..][..1] } else { &both[..] };
            for temperature in temperatures {
                let mut setting = setting.clone();
                setting["temperature"] = json!(temperature);
                all.push(setting);
            }
        }
        all.push(json!({"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3,
            "repetition_penalty": 1.2, "logit_bias": {"70": 1}, "min_p": 0.05, "top_k": 40, "top_p": 0.95,
            "min_tokens": self.tokens / 3, "stop_token_ids": [75, 80, 85, 90, 95], "bad_words": ["the", "x"],
            "stop": ["zz", "Q"]}));
        all
    }

    /// Grammars together with settings that change the logits of what they allow.
    fn shaped_grammars(&self) -> [Value; 5] {
        let schema = json!({"type": "object", "additionalProperties": false, "required": ["count"],
            "properties": {"count": {"type": "integer"}}});
        [
            json!({"regex": "([A-F][0-9]{1,2}, ){2,9}end", "logit_bias": {"70": 4, "66": -100}, "frequency_penalty": 1,
                "ignore_eos": false}),
            json!({"ebnf": "root ::= word (\" \" word)* \".\"\nword ::= [a-z]{1,6}", "bad_words": ["a", "e", "th"],
                "min_tokens": self.tokens / 2, "ignore_eos": false}),
            // The object cannot end, because another digit is always allowed.
            json!({"json_schema": schema.to_string(), "bad_words": ["}"], "repetition_penalty": 1.3, "ignore_eos": false}),
            json!({"guided_choice": ["alpha", "alphabet", "beta"], "min_tokens": 4, "presence_penalty": 1,
                "ignore_eos": false}),
            json!({"regex": "(ab|cd|ef){1,60}", "stop": ["efab", "cdcd"], "allowed_token_ids": (0..259).collect::<Vec<u32>>(),
                "ignore_eos": false}),
        ]
    }

    /// A request with a setting. Two of three ask for log probabilities.
    fn body(&self, request: usize, setting: &Value) -> Value {
        let mut params = json!({"ignore_eos": true});
        for (name, value) in setting.as_object().unwrap() {
            params[name] = value.clone();
        }
        params["max_new_tokens"] = json!(self.tokens);
        params["sampling_seed"] = json!(100 + request);
        let mut body = asking(&(self.prompt)(request));
        body["sampling_params"] = params;
        body["return_logprob"] = json!(!request.is_multiple_of(3));
        body["top_logprobs_num"] = json!(request % 3);
        body
    }

    /// Requests for several answers, and those that only another path takes.
    fn several(&self) -> Vec<Request> {
        let [first, second] = [3, 9].map(self.prompt);
        let params = |more: &[(&str, Value)]| {
            let mut params = json!({"temperature": 1.0, "sampling_seed": 40, "max_new_tokens": self.tokens / 2, "ignore_eos": true});
            for (name, value) in more {
                params[name] = value.clone();
            }
            params
        };
        let generate = |prompts: &Value, params: Value| {
            let mut body = asking(prompts);
            body["sampling_params"] = params;
            body["return_logprob"] = json!(true);
            body["top_logprobs_num"] = json!(2);
            Request { path: "/generate", body }
        };
        let complete = |prompts: &Value, more: &[(&str, Value)]| {
            let mut body = json!({"prompt": prompts, "temperature": 1.0, "seed": 40, "max_tokens": self.tokens / 2, "ignore_eos": true});
            for (name, value) in more {
                body[name] = value.clone();
            }
            Request { path: "/v1/completions", body }
        };
        let penalties =
            [("n", json!(3)), ("frequency_penalty", json!(0.8)), ("logit_bias", json!({"70": 2, "72": -3}))];
        let each = json!([params(&[("min_p", json!(0.2))]), params(&[("temperature", json!(0))])]);
        vec![
            generate(&first, params(&penalties)),
            generate(&json!([first, second]), params(&[("bad_words", json!(["e", "on"]))])),
            generate(&json!([first, second]), each),
            complete(&first, &[("n", json!(2)), ("best_of", json!(4)), ("presence_penalty", json!(1))]),
            complete(
                &first,
                &[("best_of", json!(3)), ("logprobs", json!(3)), ("repetition_penalty", json!(1.4))],
            ),
            complete(
                &json!([first, second]),
                &[("n", json!(2)), ("stop", json!(["e", "7"])), ("logprobs", json!(1))],
            ),
            complete(&json!("The keeper of the lamps says: "), &[("echo", json!(true)), ("n", json!(2))]),
            complete(&json!([second, first]), &[("echo", json!(true)), ("temperature", json!(0))]),
        ]
    }

    /// All requests. The first ones are those of [`settings`](Self::settings), in order.
    fn requests(&self) -> Vec<Request> {
        let settings = self.settings();
        let single = settings.iter().enumerate();
        let single =
            single.map(|(request, setting)| Request { path: "/generate", body: self.body(request, setting) });
        single.chain(self.several()).collect()
    }
}

/// A request, and the path that it is sent to.
struct Request {
    path: &'static str,
    body: Value,
}

/// All of an answer that may not depend on where it is computed: texts, tokens, log probabilities, ends.
fn essence(answer: &Value) -> Value {
    if let Value::Array(answers) = answer {
        return answers.iter().map(essence).collect();
    }
    if answer["choices"].is_array() {
        return json!({"choices": answer["choices"], "tokens": answer["usage"]["completion_tokens"]});
    }
    let meta = &answer["meta_info"];
    json!({
        "text": answer["text"], "tokens": answer["output_ids"], "end": meta["finish_reason"],
        "logprobs": meta["output_token_logprobs"], "top": meta["output_top_logprobs"],
    })
}

fn answer(cluster: &Cluster, request: &Request) -> Value {
    let (status, text) = cluster.post(request.path, &request.body.to_string()).unwrap();
    assert_eq!(status, 200, "{}: {text}", request.body);
    essence(&serde_json::from_str(&text).unwrap())
}

/// Asks for all of them at once.
fn all_answers(cluster: &Cluster, requests: &[Request]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            requests.iter().map(|request| scope.spawn(move || answer(cluster, request))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

/// The answers of one worker that has nothing else to do, after a check that the settings of the requests have an effect.
fn right_answers(computes: &Computes, requests: &[Request]) -> Vec<Value> {
    let (alone, _plugins) = computes.start(&ALONE, "");
    let right: Vec<Value> = requests.iter().map(|request| answer(&alone, request)).collect();
    let ends = |kind: &str| right.iter().filter(|right| right["end"]["type"] == kind).count();
    assert!(ends("stop") >= 2 && ends("length") >= 4, "{} stopped, {} did not", ends("stop"), ends("length"));
    let shown = |right: &Value| right["text"].as_str().is_some_and(|text| text.contains(computes.special.1));
    assert!(right.iter().any(shown), "no text has {:?}", computes.special);
    if !computes.slow {
        let settings = computes.settings();
        let plain = (0..settings.len()).map(|request| {
            let body = computes.body(request, &json!({"temperature": 0}));
            answer(&alone, &Request { path: "/generate", body })
        });
        let changed =
            right.iter().zip(plain).filter(|(right, plain)| right["tokens"] != plain["tokens"]).count();
        assert!(
            changed > settings.len() / 2,
            "only {changed} of {} settings change anything",
            settings.len()
        );
    }
    right
}

/// Flags of a cluster, its configuration, and how often it is asked.
type Arrangement = (Vec<&'static str>, String, u32);

fn are_equal_over(computes: &Computes, arrangements: &[Arrangement]) {
    let requests = computes.requests();
    let right = right_answers(computes, &requests);
    for (flags, config, rounds) in arrangements {
        let (cluster, _plugins) = computes.start(flags, config);
        for round in 0..*rounds {
            let found = all_answers(&cluster, &requests);
            for ((found, right), request) in found.iter().zip(&right).zip(&requests) {
                assert_eq!(found, right, "{flags:?}, round {round}: {}", request.body);
            }
        }
        let role = if flags.contains(&"aggregated") { "aggregated" } else { "decode" };
        let metrics = cluster.metrics(&cluster.worker(role));
        if flags.contains(&"--pool-pages") {
            assert!(metrics["host_retractions_total"] > 0.0, "{flags:?}: no request was preempted");
        }
        let guesses = ["host_drafted_tokens_right_total", "host_drafted_tokens_total"];
        let [right, guessed] = guesses.map(|name| metrics[name]);
        let speculates = flags.contains(&"--speculate");
        assert_eq!(
            right > 0.0 && guessed > right,
            speculates,
            "{flags:?}: {right} of {guessed} guesses right"
        );
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

fn are_equal_over_all_arrangements(computes: &Computes) {
    let (none, restores) = (String::new(), RESTORES.to_owned());
    are_equal_over(
        computes,
        &[
            (Vec::new(), none.clone(), 2),
            (CACHES.to_vec(), restores.clone(), 2),
            (vec!["--tp", "2"], none.clone(), 2),
            ([&ALONE[..], &TINY_POOL[..]].concat(), none.clone(), 2),
            ([&CACHES[..], &TINY_POOL[..]].concat(), restores.clone(), 2),
            ([&["--tp", "2"][..], &SPECULATES[..]].concat(), none.clone(), 2),
            ([&ALONE[..], &SPECULATES[..], &TINY_POOL[..]].concat(), none, 2),
            ([&CACHES[..], &SPECULATES[..], &TINY_POOL[..]].concat(), restores, 2),
        ],
    );
}

#[test]
fn the_tokens_are_the_same_over_all_arrangements() {
    are_equal_over_all_arrangements(&Computes::synthetic());
}

#[test]
fn the_tokens_of_a_model_are_the_same_over_all_arrangements() {
    are_equal_over_all_arrangements(&Computes::tiny_model());
}

/// In the group that runs one at a time, because the model takes the processor for a minute.
mod external {
    use super::*;

    #[test]
    fn the_tokens_of_a_real_model_are_the_same_over_all_arrangements() {
        let pages = tempfile::tempdir().unwrap();
        let stores =
            format!("{RESTORES}[plugin.hicache-file]\n{LOADED}dir = {:?}\n", pages.path().join("pages"));
        let caches = vec!["--plugins", "shm,hicache-file", "--prefill-radix-cache", "--decode-radix-cache"];
        let none = String::new();
        are_equal_over(
            &Computes::real_model(),
            &[
                (Vec::new(), none.clone(), 1),
                (caches, stores, 2),
                ([&["--tp", "2"][..], &SPECULATES[..]].concat(), none.clone(), 1),
                ([&ALONE[..], &TINIEST_POOL[..]].concat(), none, 1),
            ],
        );
    }
}

#[test]
fn the_tokens_are_the_same_when_the_worker_dies_in_the_middle() {
    let computes = Computes::synthetic();
    let (cluster, _plugins) = computes.start(&[], "[synthetic]\nstep-us = 20000\n");
    for setting in [
        json!({"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
        json!({"temperature": 0, "min_tokens": 50, "stop_token_ids": (32..127).step_by(2).collect::<Vec<u32>>()}),
    ] {
        let mut body = computes.body(3, &setting);
        let right = answer(&cluster, &Request { path: "/generate", body: body.clone() })["tokens"].clone();
        assert!(right.as_array().unwrap().len() > 40, "{right}");
        body["stream"] = json!(true);
        let decode = cluster.worker("decode");
        let (mut last, mut struck) = (Value::Null, false);
        for event in Events::of(&format!("{}/generate", cluster.url), &body).unwrap() {
            last = event.unwrap();
            if !struck && streaming::tokens(&last).len() >= 15 {
                struck = true;
                signal(cluster.pid("decode").unwrap(), "KILL");
            }
        }
        assert!(struck);
        assert_eq!(last["output_ids"], right, "{setting}");
        cluster.wait_for_another(&decode);
    }
}

#[test]
fn n_answers_share_their_prompts_pages_and_equal_single_ones() {
    let computes = Computes::synthetic();
    let (cluster, _plugins) = computes.start(&["--decode-radix-cache", "--prefill-radix-cache"], "");
    let prompt: Vec<u32> = (0..400).map(|token| 33 + token % 90).collect();
    let ask = |n: u32, seed: u32| {
        let params = json!({"n": n, "temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 12, "ignore_eos": true});
        let body = json!({"input_ids": prompt, "sampling_params": params});
        let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let four = ask(4, 50);
    let moved = |answer: &Value| answer["meta_info"]["transferred_bytes"].as_u64().unwrap();
    let first = moved(&four[0]);
    for number in 1..4 {
        // Only the part that fills no page is transferred for each answer.
        assert!(
            moved(&four[number]) < first / 4,
            "answer {number} moved {} of {first} bytes",
            moved(&four[number])
        );
    }
    for number in 0..4 {
        let single = ask(1, 50 + number);
        assert_eq!(single["output_ids"], four[number as usize]["output_ids"], "answer {number}");
    }
}

#[test]
fn a_stop_string_ends_a_request_as_finished_on_its_workers() {
    let computes = Computes::synthetic();
    let (cluster, _plugins) = computes.start(&[], "");
    let plain = json!({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 40, "temperature": 0}});
    let (_, text) = cluster.post("/generate", &plain.to_string()).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    let stop: String = answer["text"].as_str().unwrap().chars().skip(4).take(2).collect();
    let mut stopped = plain.clone();
    stopped["sampling_params"]["stop"] = json!([stop]);
    stopped["sampling_params"]["max_new_tokens"] = json!(100_000);
    let (_, text) = cluster.post("/generate", &stopped.to_string()).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": stop}), "{answer}");
    for role in ["prefill", "decode"] {
        cluster.wait("the request to be counted as finished", || {
            cluster.metrics(&cluster.worker(role)).get("host_requests_finished_total") == Some(&2.0)
        });
        assert_eq!(cluster.metrics(&cluster.worker(role))["host_requests_failed_total"], 0.0, "{role}");
    }
    cluster.wait("all requests to end", || cluster.all_free());
    // The log has one line for each request, with its outcome and figures.
    let line = |line: &Value| line["fields"]["message"] == "request" && line["fields"]["outcome"] == "ok";
    let lines = || cluster.log_lines().into_iter().filter(line).collect::<Vec<Value>>();
    cluster.wait("a line for each request", || lines().len() >= 2);
    let lines = lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert_eq!(
        (&lines[1]["fields"]["status"], &lines[1]["fields"]["prompt_tokens"]),
        (&json!(200), &json!(3))
    );
}
