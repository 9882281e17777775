//! Several answers to one request: `n`, `best_of`, lists of prompts.

use serde_json::{Value, json};

use super::fake_worker::{Script, Step, echoes};
use super::fixture::{Front, config};

const PATH: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Answers with its seed as a digit, again and again.
fn says_its_seed() -> Script {
    std::sync::Arc::new(|request| {
        let seed = request.sampling.as_ref().map_or(0, |sampling| sampling.seed);
        let digit = 48 + u32::try_from(seed % 10).unwrap();
        let steps = (0..request.max_new_tokens).map(|_| Step::Token(digit));
        steps.chain([Step::Finish("length")]).collect()
    })
}

async fn front(script: Script) -> (Front, super::fake_worker::FakeWorker) {
    let mut front = Front::start(config()).await;
    let worker = front.worker("all", "aggregated", script).await;
    (front, worker)
}

#[tokio::test]
async fn n_answers_have_the_seeds_that_follow_and_the_prompt_counts_once() {
    let (front, worker) = front(says_its_seed()).await;
    let mut body = json!({"prompt": "abc", "n": 3, "seed": 4, "max_tokens": 2});
    let answer = front.post(PATH, &body).await.json().await;
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["44", "55", "66"]);
    assert_eq!((&answer["choices"][2]["index"], &answer["usage"]["prompt_tokens"]), (&json!(2), &json!(3)));
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    // Each answer is the same as the answer to a single request with its seed.
    for (seed, text) in [(4, "44"), (5, "55"), (6, "66")] {
        let alone =
            front.post(PATH, &json!({"prompt": "abc", "seed": seed, "max_tokens": 2})).await.json().await;
        assert_eq!(alone["choices"][0]["text"], text);
    }
    let calls = worker.watch.calls();
    assert!(calls[..3].iter().all(|call| call.prompt == calls[0].prompt));
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = front.post(PATH, &body).await.events().await;
    let [choices @ .., usage, done] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((done, &usage["usage"]["completion_tokens"]), (&json!("[DONE]"), &json!(6)));
    let mut texts = [const { String::new() }; 3];
    for event in choices {
        let choice = &event["choices"][0];
        texts[usize::try_from(choice["index"].as_u64().unwrap()).unwrap()] +=
            choice["text"].as_str().unwrap();
    }
    assert_eq!(texts, ["44", "55", "66"]);
    front.until_metrics_say("host_requests_running 0\n").await;
}

#[tokio::test]
async fn chats_answers_appear_in_order_whichever_worker_answer_is_first() {
    let (front, _worker) = front(says_its_seed()).await;
    let body = json!({"messages": [{"role": "user", "content": "x"}], "n": 4, "seed": 1, "max_tokens": 3, "stream": true});
    let events = front.post(CHAT, &body).await.events().await;
    let mut appeared = Vec::new();
    for event in events.iter().filter(|event| event.is_object()) {
        let index = event["choices"][0]["index"].as_u64().unwrap();
        if !appeared.contains(&index) {
            appeared.push(index);
            assert_eq!(event["choices"][0]["delta"]["role"], "assistant");
        }
    }
    assert_eq!(appeared, [0, 1, 2, 3]);
}

#[tokio::test]
async fn lists_of_prompts_are_answered_in_their_order_and_echoed_when_asked() {
    let (front, _worker) = front(echoes()).await;
    let body = json!({"prompt": ["ab", [99, 100]], "n": 2, "max_tokens": 3, "echo": true, "temperature": 0});
    let answer = front.post(PATH, &body).await.json().await;
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["ababa", "ababa", "cdcdc", "cdcdc"]);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(4), &json!(12))
    );
}

#[tokio::test]
async fn best_of_returns_the_likeliest_per_token() {
    // The fake worker's tokens all have the same log probability, so the candidates keep their order.
    let (front, worker) = front(says_its_seed()).await;
    let answer = front
        .post(PATH, &json!({"prompt": "a", "n": 1, "best_of": 3, "seed": 1, "max_tokens": 1}))
        .await
        .json()
        .await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 1);
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert_eq!(answer["usage"]["completion_tokens"], 3, "all of them were computed");
    assert!(worker.watch.calls().iter().all(|call| call.sampling.as_ref().unwrap().logprobs == Some(0)));
}

#[tokio::test]
async fn generate_takes_batches_with_settings_for_each() {
    let (front, _worker) = front(echoes()).await;
    let mut body = json!({"text": ["ab", "cd"], "rid": ["first", "second"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 3}]});
    let answer = front.post("/generate", &body).await.json().await;
    assert_eq!((&answer[0]["text"], &answer[1]["text"]), (&json!("a"), &json!("cdc")));
    assert_eq!((&answer[0]["meta_info"]["id"], &answer[1]["index"]), (&json!("first"), &json!(1)));
    body["stream"] = json!(true);
    let events = front.post("/generate", &body).await.events().await;
    let last = |index: u64| {
        let of = events.iter().rev().find(|event| event["index"] == index).unwrap();
        (of["text"].clone(), of["meta_info"]["finish_reason"]["type"].clone())
    };
    assert_eq!((last(0), last(1)), ((json!("a"), json!("length")), (json!("cdc"), json!("length"))));
    let one = json!({"input_ids": [[97, 98]], "sampling_params": {"max_new_tokens": 1}});
    assert!(front.post("/generate", &one).await.json().await.is_array(), "a list is answered with a list");
}

#[tokio::test]
async fn each_answer_takes_a_place() {
    let mut config = config();
    config.max_requests = 5;
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", echoes()).await;
    let asking = |n: u32| json!({"prompt": "a", "n": n, "max_tokens": 1});
    assert_eq!(front.post(PATH, &asking(5)).await.status, 429, "more than the client's share");
    assert_eq!(front.post(PATH, &asking(4)).await.status, 200);
    front.until_metrics_say("host_requests_running 0\n").await;
}
