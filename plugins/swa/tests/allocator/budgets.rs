//! The components that are declared for a model's layers.

use host_plugin_api::{ErrorCode, LayerGroup, LayerKind, Retains};

use super::pool::Pool;

const POOL: Pool = Pool { page_tokens: 64, window: 128, pages: 1000, parts: 3, ratio: None };

fn budgets(pool: Pool) -> [u32; 2] {
    pool.open().components.map(|of| of.pages)
}

#[test]
fn windows_retain_the_newest_tokens_and_full_layers_all() {
    let [full, window] = POOL.open().components;
    assert_eq!((full.group, full.retains, full.tokens), (0, Retains::ALL, 0));
    assert_eq!((window.group, window.retains, window.tokens), (1, Retains::NEWEST, 128));
    assert_ne!(full.id, window.id);
}

#[test]
fn without_a_ratio_each_component_may_fill_the_pool() {
    assert_eq!(budgets(POOL), [1000, 333]);
    assert_eq!(budgets(Pool { pages: 7, ..POOL }), [7, 2], "two windows of three pages");
}

/// As SGLang divides a pool by `swa_full_tokens_ratio`: this many tokens of window for each token of the full layers.
#[test]
fn a_ratio_divides_the_pool_and_what_is_left_over_is_the_full_layers() {
    let of = |ratio, pages, parts| budgets(Pool { ratio: Some(ratio), pages, parts, ..POOL });
    // 1000 / (1 + 0.5 * 3) = 400 full pages, 200 windows of 3.
    assert_eq!(of(0.5, 1000, 3), [400, 200]);
    // 1001 / 1.2 = 834.2, and 834 * 0.2 = 166.8.
    assert_eq!(of(0.2, 1001, 1), [835, 166]);
    assert_eq!(of(1.0, 1000, 5), [170, 166]);
}

#[test]
fn a_ratio_that_holds_no_window_is_refused_with_the_way_out() {
    let refused = |ratio, pages, parts| {
        let pool = Pool { ratio: Some(ratio), pages, parts, ..POOL };
        let error = host_plugin_swa::open(&pool.opening()).err().unwrap();
        assert_eq!(error.code, ErrorCode::CONFIG);
        error.message
    };
    for ratio in [0.0, -1.0, 1.5, f64::NAN, f64::INFINITY] {
        let said = refused(ratio, 1000, 3);
        assert!(said.contains("above 0 and at most 1"), "{said}");
    }
    // 3 pages are 192 tokens, a window and a page as many.
    let said = refused(0.01, 309, 1);
    assert!(said.contains("leaves windows 3 pages of 64 tokens in a pool of 309"), "{said}");
    assert_eq!(budgets(Pool { ratio: Some(0.01), pages: 404, parts: 1, ..POOL }), [400, 4]);
}

#[test]
fn settings_and_layers_that_it_does_not_know_are_refused() {
    let with = |config: &str| {
        let mut opening = POOL.opening();
        opening.config = config.to_owned();
        host_plugin_swa::open(&opening).err().unwrap()
    };
    assert_eq!(with("ratio = 0.5").code, ErrorCode::CONFIG);
    assert_eq!(with("full_tokens_ratio = 'half'").code, ErrorCode::CONFIG);
    let mut opening = POOL.opening();
    opening.groups[1] = LayerGroup { kind: LayerKind::STATE, window: 0, ..opening.groups[1] };
    let error = host_plugin_swa::open(&opening).err().unwrap();
    assert_eq!(error.code, ErrorCode::INVALID_ARGUMENT);
    assert!(
        error.message.contains("not layers that attend to all tokens or to a window"),
        "{}",
        error.message
    );
}
