//! Questions about objects in a bucket.

use super::{Agent, Extent, Refusal, Segment, check, made};

impl Agent {
    /// Whether there are objects of these names. Blocks until all are answered, for which NIXL takes at most 30 s.
    ///
    /// # Errors
    /// When one of them could not be queried. Then nothing is known of any.
    pub fn query_objects(&mut self, names: &[Vec<u8>]) -> Result<Vec<bool>, Refusal> {
        let place = |device| Extent { segment: Segment::Object, address: 0, length: 0, device };
        let places: Vec<_> = (0..).zip(names).map(|(number, name)| (place(number), &name[..])).collect();
        let list = self.described(Segment::Object, &places)?;
        let api = &self.library.api;
        // SAFETY: the place for the handle is ours.
        let options = made("create_opt_args", |to| unsafe { (api.create_opt_args)(to) });
        // SAFETY: the place for the handle is ours.
        let answers = made("create_query_resp_list", |to| unsafe { (api.create_query_resp_list)(to) });
        let found = match (&options, &answers) {
            (Ok(options), Ok(answers)) => {
                // SAFETY: options and backend are alive. NIXL asks for exactly one backend.
                let code = unsafe { (api.opt_args_add_backend)(*options, self.backend) };
                check("opt_args_add_backend", code).and_then(|()| {
                    // SAFETY: agent, list, answers and options are alive until this returns.
                    let code = unsafe { (api.query_mem)(self.agent, list, *answers, *options) };
                    check("query_mem", code)?;
                    self.answers(*answers, names.len())
                })
            }
            (Err(refusal), _) | (_, Err(refusal)) => Err(refusal.clone()),
        };
        if let Ok(answers) = answers {
            // SAFETY: our own list, destroyed once.
            let _destroyed = unsafe { (api.destroy_query_resp_list)(answers) };
        }
        if let Ok(options) = options {
            // SAFETY: our own options, destroyed once.
            let _destroyed = unsafe { (api.destroy_opt_args)(options) };
        }
        // SAFETY: our own list, destroyed once.
        let _destroyed = unsafe { (api.destroy_reg_dlist)(list) };
        found
    }

    fn answers(&self, answers: super::Handle, count: usize) -> Result<Vec<bool>, Refusal> {
        let api = &self.library.api;
        let mut size = 0;
        // SAFETY: the list is alive, the place for the answer is ours.
        check("query_resp_list_size", unsafe { (api.query_resp_list_size)(answers, &raw mut size) })?;
        if size != count {
            return Err(Refusal::of("query_mem"));
        }
        (0..size)
            .map(|index| {
                let mut there = false;
                // SAFETY: as above.
                let code = unsafe { (api.query_resp_list_has_value)(answers, index, &raw mut there) };
                check("query_resp_list_has_value", code).map(|()| there)
            })
            .collect()
    }
}
