//! Answers under grammars: every arrangement of workers gives the same tokens, and an answer that ends follows its grammar.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start, signal};
use host_tests::model::tiny_qwen3;
use host_tests::plugin_files;
use host_tests::streaming::{self, Events};
use serde_json::{Value, json};

const HOST: &str = env!("CARGO_BIN_EXE_host");

/// A server of the tiny model with these flags.
fn serve(model: &Path, flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "memory"]);
    let given = ["--model", model.to_str().unwrap(), "--plugins-dir", plugins.path().to_str().unwrap()];
    let flags: Vec<String> = given.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
    let start = Start { program: Path::new(HOST), flags, config: config.to_owned(), workers };
    (Cluster::start(&start), plugins)
}

fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    tiny_qwen3(folder.path(), 5).unwrap();
    folder
}

/// The schema of an object whose answers are short enough to end.
fn schema() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["kind", "count", "tags"],
        "properties": {
            "kind": {"enum": ["größe", "weight"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
    })
}

/// Whether a text follows [`schema`].
fn follows(text: &str) -> bool {
    let Ok(Value::Object(object)) = serde_json::from_str(text) else { return false };
    let tags = object.get("tags").and_then(Value::as_array);
    object.len() == 3
        && ["größe", "weight"].iter().any(|kind| object["kind"] == **kind)
        && object["count"].as_u64().is_some_and(|count| count <= 9999)
        && tags.is_some_and(|tags| {
            let short = |tag: &Value| tag.as_str().is_some_and(|tag| tag.chars().count() <= 8);
            tags.len() <= 3 && tags.iter().all(short)
        })
}

/// Grammars in the spellings of two servers, greedy and drawn.
fn requests() -> Vec<Value> {
    let grammars = [
        json!({"json_schema": schema().to_string()}),
        json!({"structured_outputs": {"json": schema(), "disable_any_whitespace": true}}),
        json!({"regex": "([A-F][0-9]{1,2}, ){3}end"}),
        json!({"ebnf": "root ::= word (\" \" word){2,4} \".\"\nword ::= [a-z]{1,6}"}),
        json!({"guided_choice": ["alpha", "alphabet", "beta"]}),
        // After two repetitions the rest can be guessed.
        json!({"regex": "(the lamp of ward [0-9], ){6}end"}),
        // The same with settings that change the logits of allowed tokens.
        json!({"json_schema": schema().to_string(), "bad_words": ["größe"], "logit_bias": {"34": 1}, "min_tokens": 30}),
        json!({"regex": "([A-F][0-9]{1,2}, ){3}end", "logit_bias": {"67": 4, "68": -100}, "frequency_penalty": 1.5}),
        json!({"ebnf": "root ::= word (\" \" word){2,4} \".\"\nword ::= [a-z]{1,6}", "bad_words": ["a", "e", "th"],
            "presence_penalty": 1, "min_tokens": 12}),
        json!({"guided_choice": ["alpha", "alphabet", "beta"], "repetition_penalty": 1.6, "min_tokens": 4}),
    ];
    let samplings = [json!({"temperature": 0}), json!({"temperature": 1.0, "sampling_seed": 11})];
    let with = |grammar: &Value, sampling: &Value| {
        let mut params = grammar.clone();
        for (name, value) in sampling.as_object().unwrap() {
            params[name] = value.clone();
        }
        params["max_new_tokens"] = json!(160);
        json!({"text": "The keeper of the harbour counts the lamps and says: ", "sampling_params": params, "return_logprob": true})
    };
    grammars.iter().flat_map(|grammar| samplings.iter().map(|sampling| with(grammar, sampling))).collect()
}

/// Text, tokens, the bits of their log probabilities, and the reason of the end.
type Answer = (String, Vec<(u64, u64)>, String);

fn answer(cluster: &Cluster, body: &Value) -> Answer {
    let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{body}: {text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let meta = &answer["meta_info"];
    let tokens = meta["output_token_logprobs"].as_array().unwrap().iter();
    let tokens = tokens.map(|token| (token[1].as_u64().unwrap(), token[0].as_f64().unwrap().to_bits()));
    let reason = meta["finish_reason"]["type"].as_str().unwrap();
    (answer["text"].as_str().unwrap().to_owned(), tokens.collect(), reason.to_owned())
}

fn answers(cluster: &Cluster) -> Vec<Answer> {
    requests().iter().map(|body| answer(cluster, body)).collect()
}

#[test]
fn every_arrangement_draws_the_same_tokens_and_what_stops_follows_its_grammar() {
    let model = model();
    let expected = {
        let (cluster, _plugins) = serve(model.path(), &["--role", "aggregated"], "");
        answers(&cluster)
    };
    let mut stopped = 0;
    for (body, (text, _, reason)) in requests().iter().zip(&expected) {
        if reason == "stop" {
            stopped += 1;
            let params = &body["sampling_params"];
            let right = if params.get("json_schema").is_some() || params.get("structured_outputs").is_some() {
                follows(text)
            } else if params.get("regex").is_some() {
                text.ends_with(", end") && [3, 6].contains(&text.matches(", ").count())
            } else if params.get("ebnf").is_some() {
                (3..=5).contains(&text.trim_end_matches('.').split(' ').count()) && text.ends_with('.')
            } else {
                ["alpha", "alphabet", "beta"].contains(&text.as_str())
            };
            assert!(right, "{params}: {text}");
        }
    }
    assert!(stopped >= 8, "{stopped} of {} stopped: {expected:?}", expected.len());
    let split: [(&str, &[&str], &str); 4] = [
        ("split", &[], ""),
        ("guessing", &["--speculate", "ngram"], ""),
        (
            "through caches",
            &["--prefill-radix-cache", "--decode-radix-cache", "--hierarchical-cache"],
            RESTORES,
        ),
        ("over ranks", &["--prefill-tp", "2", "--decode-tp", "2"], ""),
    ];
    for (name, flags, config) in split {
        let (cluster, _plugins) = serve(model.path(), flags, config);
        // In the second round caches hold the prompts.
        for time in ["first", "second"] {
            assert_eq!(answers(&cluster), expected, "{name}, {time} time");
        }
        let right = cluster.metrics(&cluster.worker("decode"))["host_drafted_tokens_right_total"];
        // How many depends on the masks that come in time: a guess whose mask is late counts as neither right nor wrong.
        assert_eq!(right > 0.0, name == "guessing", "{name}: {right} guesses right");
    }
    let (cluster, _plugins) = serve(model.path(), &["--role", "aggregated", "--tp", "2"], "");
    assert_eq!(answers(&cluster), expected, "one worker of two ranks");
}

#[test]
fn preempted_answers_go_on_in_their_grammar() {
    let model = model();
    let body = |request: u32| {
        let prompt: Vec<u32> = (0..30 + request * 3).map(|token| (token * 7 + request) % 200).collect();
        // After two repetitions the rest can be guessed.
        let repeats = "(the lamp of ward [0-9], ){60,}";
        let regex = if request % 4 == 3 { repeats } else { "([a-z]{1,9} ){60,}" };
        let mut params =
            json!({"regex": regex, "temperature": 1.0, "sampling_seed": request, "max_new_tokens": 200});
        if request % 4 == 1 {
            params["presence_penalty"] = json!(1);
            params["bad_words"] = json!(["e", "on", "a"]);
            params["logit_bias"] = json!({"32": -2, "122": 3});
            params["min_tokens"] = json!(150);
        }
        json!({"input_ids": prompt, "sampling_params": params, "return_logprob": true})
    };
    let expected: Vec<Answer> = {
        let (cluster, _plugins) = serve(model.path(), &["--role", "aggregated"], "");
        (0..8).map(|request| answer(&cluster, &body(request))).collect()
    };
    let tiny =
        ["--pool-pages", "36", "--reserved-decode-tokens", "16", "--max-batch", "16", "--chunk-tokens", "64"];
    for more in [&[][..], &["--tp", "2", "--speculate", "ngram"]] {
        let flags = [&["--role", "aggregated"][..], &tiny, more].concat();
        let (cluster, _plugins) = serve(model.path(), &flags, "");
        let found: Vec<Answer> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|request| {
                    scope.spawn({
                        let cluster = &cluster;
                        move || answer(cluster, &body(request))
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        assert_eq!(found, expected, "{more:?}");
        let metrics = cluster.metrics(&cluster.worker("aggregated"));
        assert!(metrics["host_retractions_total"] > 0.0, "{more:?}: nothing was preempted: {metrics:?}");
        let right = metrics["host_drafted_tokens_right_total"];
        assert_eq!(right > 0.0, !more.is_empty(), "{more:?}: {right} guesses right");
    }
}

#[test]
fn an_answer_whose_workers_die_goes_on_in_its_grammar() {
    let model = model();
    let (cluster, _plugins) = serve(model.path(), &[], "");
    // A long answer, which its position in the grammar decides entirely: a lost state shows at once.
    let params = json!({"regex": "(one two three four five six seven eight nine ten eleven twelve ){40}", "temperature": 0, "max_new_tokens": 900});
    let read = |strike: &mut dyn FnMut()| {
        let body = json!({"text": "Count: ", "stream": true, "sampling_params": params});
        let (mut last, mut struck) = (Value::Null, false);
        for event in Events::of(&format!("{}/generate", cluster.url), &body).unwrap() {
            let event = event.unwrap();
            if !struck && streaming::tokens(&event).len() >= 20 {
                struck = true;
                assert!(event["meta_info"]["finish_reason"].is_null(), "over before it could be struck");
                strike();
            }
            last = event;
        }
        (last["output_ids"].clone(), last["text"].clone())
    };
    let right = read(&mut || {});
    for victims in [&["decode"][..], &["prefill"], &["decode", "prefill"]] {
        let before: Vec<_> = victims.iter().map(|role| cluster.worker(role)).collect();
        let found = read(&mut || {
            for role in victims {
                signal(cluster.pid(role).unwrap(), "KILL");
            }
        });
        assert_eq!(found, right, "{victims:?} killed");
        for worker in &before {
            cluster.wait_for_another(worker);
        }
    }
}

#[test]
fn what_cannot_be_carried_out_is_an_error_of_its_request_alone() {
    let model = model();
    let (cluster, _plugins) = serve(model.path(), &[], "");
    let ask = |params: Value| {
        let mut params = params;
        params["max_new_tokens"] = json!(8);
        let body = json!({"text": "Hello", "sampling_params": params});
        cluster.post("/generate", &body.to_string()).unwrap()
    };
    for (params, words) in [
        (json!({"regex": "(a"}), "regular expression cannot be used"),
        (json!({"json_schema": "{\"type\": \"strange\"}"}), "JSON schema cannot be used"),
        // A worker refuses this one, because only workers know the model's special tokens.
        (json!({"structured_outputs": {"grammar": "start: <|nothing|>"}}), "grammar cannot be used"),
        (json!({"regex": "a{1000}{1000}"}), "multiply to"),
    ] {
        let (status, text) = ask(params);
        assert!(status == 400 && text.contains(words), "{status} {text}");
    }
    let (status, text) = ask(json!({"regex": "[a-c]{3}"}));
    assert_eq!(status, 200, "{text}");
}

#[test]
fn workers_without_a_vocabulary_say_so() {
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--kv-memory", "4MiB"];
    let start = Start {
        program: Path::new(HOST),
        flags: flags.map(str::to_owned).to_vec(),
        config: String::new(),
        workers: 1,
    };
    let cluster = Cluster::start(&start);
    let body = json!({"prompt": "x", "response_format": {"type": "json_object"}});
    let (status, text) = cluster.post("/v1/completions", &body.to_string()).unwrap();
    assert!(status == 400 && text.contains("takes no requests with a grammar"), "{status} {text}");
}
