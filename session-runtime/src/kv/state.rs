//! The life of a session's KV: one table of states and events.

use serde::{Deserialize, Serialize};

/// Where a session's KV is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvState {
    /// There are no tokens, or none has been computed yet.
    #[default]
    None,
    /// On the device and used by a running generation.
    Active,
    /// On the device, unused: a tool runs or the user thinks.
    Idle,
    /// Not on the device; cells on a lower tier.
    Evicted,
    /// On its way back to the device.
    Restoring,
    /// Back on the device, not yet used.
    Restored,
    /// Saved under another contract: will be recomputed.
    Stale,
    /// No copy anywhere: will be recomputed from the tokens.
    Lost,
}

/// What happens to a session's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvEvent {
    /// A generation begins to use it, all of it being on the device.
    Activate,
    /// The generation ends.
    Rest,
    /// The device copy is dropped, cells remain.
    Evict,
    /// The device copy is dropped, nothing remains.
    Drop,
    /// A restore begins.
    Restore,
    /// The restore ended: everything is on the device.
    Arrive,
    /// The restore was given up.
    Abandon,
    /// The saved cells belong to another contract.
    Refuse,
    /// Cells of the same tokens, which another session saved, were found.
    Find,
}

/// The state that follows, or `None` where the event cannot happen.
pub fn transition(state: KvState, event: KvEvent) -> Option<KvState> {
    use KvEvent as E;
    use KvState as S;
    Some(match (state, event) {
        (S::None | S::Idle | S::Restored, E::Activate) => S::Active,
        (S::Active, E::Rest) => S::Idle,
        (S::Active | S::Idle | S::Restored, E::Evict) => S::Evicted,
        (S::None | S::Active | S::Idle | S::Restored | S::Evicted | S::Stale, E::Drop) => S::Lost,
        (S::Evicted | S::Stale | S::Lost, E::Restore) => S::Restoring,
        (S::Restoring, E::Arrive) => S::Restored,
        (S::Restoring, E::Abandon) => S::Evicted,
        (S::Evicted, E::Refuse) => S::Stale,
        (S::None, E::Find) => S::Evicted,
        _ => return None,
    })
}

impl KvState {
    /// Every state, in the order of a KV's life.
    pub const ALL: [Self; 8] = [
        Self::None,
        Self::Active,
        Self::Idle,
        Self::Evicted,
        Self::Restoring,
        Self::Restored,
        Self::Stale,
        Self::Lost,
    ];

    /// Whether the KV is on the device.
    pub fn is_resident(self) -> bool {
        matches!(self, Self::Active | Self::Idle | Self::Restored)
    }

    /// The word used in the API, the journal and the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Active => "active",
            Self::Idle => "idle",
            Self::Evicted => "evicted",
            Self::Restoring => "restoring",
            Self::Restored => "restored",
            Self::Stale => "stale",
            Self::Lost => "lost",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_can_come_back_to_active() {
        for start in KvState::ALL {
            let mut state = start;
            for event in [KvEvent::Rest, KvEvent::Restore, KvEvent::Arrive, KvEvent::Activate] {
                state = transition(state, event).unwrap_or(state);
            }
            assert_eq!(state, KvState::Active, "from {start:?}");
        }
    }

    #[test]
    fn i9_a_restore_is_never_evicted() {
        assert_eq!(transition(KvState::Restoring, KvEvent::Evict), None);
        assert_eq!(transition(KvState::Restoring, KvEvent::Drop), None);
    }

    #[test]
    fn only_resident_states_are_evicted() {
        for state in KvState::ALL {
            assert_eq!(transition(state, KvEvent::Evict).is_some(), state.is_resident());
        }
    }
}
