//! Log probabilities of prompts: `echo` with `logprobs`.

use serde_json::{Value, json};

use super::fake_worker::{FakeWorker, Script, Step, echoes, says, steps};
use super::fixture::{Front, config};

const PATH: &str = "/v1/completions";

/// A worker that finds log probabilities, and says "xy".
fn scores() -> Script {
    std::sync::Arc::new(|request| match request.scores {
        Some(_) => vec![Step::Finish("length")],
        None => says("xy")(request),
    })
}

async fn front() -> (Front, FakeWorker) {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", scores()).await;
    (front, worker)
}

fn asking() -> Value {
    json!({"prompt": "abc", "echo": true, "logprobs": 1, "max_tokens": 2, "temperature": 0})
}

/// What a completion of "abc" with "xy" tells.
fn told() -> Value {
    json!({
        "tokens": ["a", "b", "c", "x", "y"],
        "token_logprobs": [null, -1.0, -2.0, -0.5, -0.5],
        "top_logprobs": [null, {"b": -1.0, "c": -0.5}, {"c": -2.0, "d": -0.5}, {"x": -0.5}, {"y": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    })
}

#[tokio::test]
async fn the_prompts_tokens_come_before_those_of_the_answer() {
    let (front, worker) = front().await;
    let answer = front.post(PATH, &asking()).await.json().await;
    assert_eq!(answer["choices"][0]["text"], "abcxy");
    assert_eq!(answer["choices"][0]["logprobs"], told());
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(answer["usage"], usage, "the cache has the prompt because this request computed it");
    let calls = worker.watch.calls();
    assert_eq!(calls.iter().map(|call| call.scores).collect::<Vec<_>>(), [Some(1), None]);
    assert!(calls.iter().all(|call| call.prompt == [97, 98, 99]));
}

#[tokio::test]
async fn a_streams_first_event_has_the_prompt() {
    let (front, _worker) = front().await;
    let mut body = asking();
    body["stream"] = json!(true);
    let events = front.post(PATH, &body).await.events().await;
    let choices: Vec<&Value> = events.iter().map(|event| &event["choices"][0]).collect();
    assert_eq!(choices[0]["text"], "abc");
    let parts = ["tokens", "token_logprobs", "top_logprobs", "text_offset"].map(|field| {
        let parts = choices.iter().filter_map(|choice| choice["logprobs"][field].as_array());
        (field.to_owned(), parts.flatten().cloned().collect::<Value>())
    });
    assert_eq!(Value::Object(parts.into_iter().collect()), told());
}

#[tokio::test]
async fn no_tokens_of_an_answer_may_be_asked_for_and_each_answer_has_the_prompt() {
    let (front, worker) = front().await;
    for stream in [false, true] {
        let mut body = asking();
        (body["max_tokens"], body["n"], body["stream"]) = (json!(0), json!(2), json!(stream));
        let reply = front.post(PATH, &body).await;
        let choices: Vec<Value> = match stream {
            false => reply.json().await["choices"].as_array().unwrap().clone(),
            true => reply.events().await.iter().map(|event| event["choices"][0].clone()).collect(),
        };
        for number in [0, 1] {
            let of = || choices.iter().filter(|choice| choice["index"] == number);
            assert_eq!(of().map(|choice| choice["text"].as_str().unwrap()).collect::<String>(), "abc");
            let tokens: Vec<&Value> =
                of().filter_map(|choice| choice["logprobs"]["token_logprobs"].as_array()).flatten().collect();
            assert_eq!(tokens, [&Value::Null, &json!(-1.0), &json!(-2.0)], "{number}");
            assert_eq!(of().next_back().unwrap()["finish_reason"], "length");
        }
    }
    assert_eq!(worker.watch.calls().len(), 2, "the prompt is computed once for both answers");
    front.until_metrics_say("host_requests_running 0\n").await;
    let without = json!({"prompt": "abc", "max_tokens": 0});
    assert_eq!(front.post(PATH, &without).await.status, 400);
    let echo = json!({"prompt": "abc", "max_tokens": 0, "echo": true});
    let answer = front.post(PATH, &echo).await.json().await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("abc"), &Value::Null));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn lists_of_prompts_have_their_own_and_offsets_count_characters() {
    let (front, _worker) = front().await;
    let mut body = asking();
    body["prompt"] = json!(["hé", "z"]);
    let answer = front.post(PATH, &body).await.json().await;
    let [first, second] = [0, 1].map(|choice: usize| &answer["choices"][choice]["logprobs"]);
    assert_eq!(first["token_logprobs"], json!([null, -1.0, -2.0, -0.5, -0.5]));
    assert_eq!(first["text_offset"], json!([0, 1, 1, 2, 3]), "the second byte of a character ends it");
    assert_eq!(second["tokens"], json!(["z", "x", "y"]));
    assert_eq!(second["text_offset"], json!([0, 1, 2]));
}

#[tokio::test]
async fn generate_tells_of_the_prompt_from_a_token_on() {
    let (front, worker) = front().await;
    for (from, tokens, top) in [
        (
            0,
            json!([[null, 97, "a"], [-1.0, 98, "b"], [-2.0, 99, "c"]]),
            json!([null, [[-0.5, 99, null]], [[-0.5, 100, null]]]),
        ),
        (2, json!([[null, 99, "c"]]), json!([null])),
        (3, json!([]), json!([])),
        (-1, json!([]), json!([])),
    ] {
        let mut body = json!({"text": "abc", "return_logprob": true, "top_logprobs_num": 1, "logprob_start_len": from,
            "sampling_params": {"max_new_tokens": 2, "temperature": 0}});
        let answer = front.post("/generate", &body).await.json().await;
        assert_eq!(answer["text"], "xy");
        assert_eq!(answer["meta_info"]["input_token_logprobs"], tokens, "{from}");
        assert_eq!(answer["meta_info"]["input_top_logprobs"], top, "{from}");
        assert_eq!(answer["meta_info"]["output_token_logprobs"][0], json!([-0.5, 120, "x"]));
        body["stream"] = json!(true);
        let events = front.post("/generate", &body).await.events().await;
        let [first, .., last, _done] = &events[..] else { panic!("{events:?}") };
        assert_eq!(last["meta_info"]["input_token_logprobs"], tokens, "{from}");
        assert_eq!(first["meta_info"].get("input_token_logprobs"), None);
    }
    // What asks for no log probabilities takes none.
    let calls = worker.watch.calls().len();
    let body = json!({"text": "abc", "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 2}});
    assert_eq!(front.post("/generate", &body).await.json().await["text"], "xy");
    assert_eq!(worker.watch.calls().len(), calls + 1);
}

#[tokio::test]
async fn prefill_is_asked_alone_and_another_one_when_it_fails() {
    let mut front = Front::start(config()).await;
    let mut bad = front.worker("bad", "prefill", steps(vec![Step::Break])).await;
    let answers: Script = std::sync::Arc::new(|request| match request.scores {
        Some(_) => vec![Step::Finish("length")],
        None => vec![Step::Finish("prefill")],
    });
    let good = front.worker("good", "prefill", answers).await;
    let load = host_wire::proto::Load { running: 9, ..Default::default() };
    assert!(front.heartbeat_with(good.info.instance, load).await);
    let decode = front.worker("decode", "decode", says("xy")).await;
    let answer = front.post(PATH, &asking()).await.json().await;
    assert_eq!(answer["choices"][0]["logprobs"], told());
    assert!(bad.watch.calls().iter().any(|call| call.scores.is_some()), "the bad one was tried");
    assert!(decode.watch.calls().iter().all(|call| call.scores.is_none()));
    bad.kill();
    front.until_metrics_say("host_requests_running 0\n").await;
}

#[tokio::test]
async fn a_worker_that_cannot_find_them_or_answers_instead_is_named() {
    let mut front = Front::start(config()).await;
    let mut old = FakeWorker::start("old", "aggregated", 3, echoes());
    old.info.scores = false;
    assert!(front.register(old.info.clone()).await.accepted);
    let reply = front.post(PATH, &asking()).await;
    assert_eq!(reply.status, 400);
    let error = reply.json().await.to_string();
    assert!(error.contains("older release") && error.contains("leave echo or logprobs out"), "{error}");
    assert!(old.watch.calls().is_empty());

    let mut front = Front::start(config()).await;
    let _tokens = front.worker("tokens", "aggregated", echoes()).await;
    let reply = front.post(PATH, &asking()).await;
    assert_eq!(reply.status, 500);
    let error = reply.json().await.to_string();
    assert!(error.contains("sent tokens where log probabilities were asked for"), "{error}");
}
