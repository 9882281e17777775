use std::time::Duration;

use super::*;

struct Receiver;

impl Peer for Receiver {
    fn id(&self) -> PeerId {
        PeerId(1)
    }

    fn is_gone(&self) -> bool {
        false
    }
}

const NOTHING: &[Write] = &[];

fn submission(tag: u64) -> Submission {
    let notification = [0; NOTIFICATION_BYTES];
    Submission { peer: PeerId(1), notification_length: 0, tag: Tag(tag), notification }
}

fn queue(submissions: u32) -> (Queue<Receiver>, Arc<Receiver>) {
    (Queue::new(submissions, 4), Arc::new(Receiver))
}

#[test]
fn a_failed_submission_settles_when_its_connection_has_ended_and_not_when_it_completes() {
    let (queue, peer) = queue(2);
    let index = queue.take_in(&submission(5), &peer, NOTHING).unwrap();
    assert!(!queue.is_settled(Tag(5)));
    queue.finish(index, -11, 0, Some(PeerId(7)));
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }; 4];
    assert_eq!((queue.take(&mut done), done[0].status), (1, -11));
    queue.settle(PeerId(8));
    assert!(!queue.is_settled(Tag(5)), "another connection's end says nothing about this one");
    queue.settle(PeerId(7));
    assert!(queue.is_settled(Tag(5)));
}

#[test]
fn cancelling_reaches_what_has_not_ended_and_nothing_else() {
    let (queue, peer) = queue(3);
    assert!(!queue.cancel(Tag(1)));
    let first = queue.take_in(&submission(1), &peer, NOTHING).unwrap();
    let second = queue.take_in(&submission(2), &peer, NOTHING).unwrap();
    assert!(queue.cancel(Tag(1)));
    assert!(queue.is_cancelled(first) && !queue.is_cancelled(second));
    queue.finish(first, -12, 0, None);
    assert!(!queue.cancel(Tag(1)) && queue.is_settled(Tag(1)));
    assert!(queue.cancel(Tag(2)) && queue.is_cancelled(second), "what it has not posted is not wanted");
}

#[test]
fn slots_that_no_thread_took_over_are_free_again_and_settled() {
    let (queue, peer) = queue(1);
    let index = queue.take_in(&submission(1), &peer, NOTHING).unwrap();
    assert!(queue.take_in(&submission(2), &peer, NOTHING).is_none());
    assert!(queue.cancel(Tag(1)) && queue.is_cancelled(index));
    queue.give_back(index);
    assert!(queue.is_settled(Tag(1)) && !queue.cancel(Tag(1)));
    let index = queue.take_in(&submission(2), &peer, NOTHING).unwrap();
    assert!(!queue.is_cancelled(index), "a slot's last submission was cancelled, not this one");
}

#[test]
fn a_slot_that_is_used_again_has_the_writes_of_its_submission_alone() {
    let (queue, peer) = queue(1);
    let write = |offset| Write { source_offset: offset, length: 1, ..Write::default() };
    let index = queue.take_in(&submission(1), &peer, &[3, 1, 2].map(write)).unwrap();
    let content = queue.content(index);
    let offsets = |from| content.writes(from).map(|write| write.source_offset).collect::<Vec<_>>();
    assert_eq!((offsets(0), offsets(2), content.len()), (vec![3, 1, 2], vec![2], 3));
    assert_eq!((content.write(0), content.write(3)), (Some(write(3)), None));
    drop(content);
    queue.finish(index, 0, 3, None);
    assert_eq!(Arc::strong_count(&peer), 1, "the peer is let go at the end");
    let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
    assert_eq!(queue.take(&mut done), 1);
    let index = queue.take_in(&submission(2), &peer, &[write(9)]).unwrap();
    assert_eq!(queue.content(index).writes(0).collect::<Vec<_>>(), [write(9)]);
}

#[test]
fn waiting_for_a_peer_ends_with_its_last_submission_or_the_deadline() {
    let (queue, peer) = queue(1);
    let soon = Instant::now() + Duration::from_millis(1);
    let (queue, peer) = (&queue, &peer);
    let index = queue.take_in(&submission(1), peer, NOTHING).unwrap();
    assert!(!queue.wait_idle(PeerId(1), soon) && queue.wait_idle(PeerId(2), soon));
    std::thread::scope(|scope| {
        let late = Instant::now() + Duration::from_secs(300);
        let waiting = scope.spawn(move || queue.wait_idle(PeerId(1), late));
        while locked(&queue.state).waiting == 0 {
            assert!(Instant::now() < late, "the thread does not wait");
            std::thread::yield_now();
        }
        queue.finish(index, 0, 0, None);
        assert!(waiting.join().unwrap());
    });
}
