"""Keys and values by slot."""

import torch

from workers.engine.kv_store import KVStore, PoolCache


def store() -> KVStore:
    cpu = torch.device("cpu")
    made = KVStore(2, 6, 2, 3, dtype=torch.float32, device=cpu, host_slots=4)
    for layer in range(2):
        for slot in range(6):
            made.keys[layer][slot] = 10 * layer + slot
            made.values[layer][slot] = -(10 * layer + slot)
    return made


def slots_of(tensor: torch.Tensor) -> list[float]:
    assert bool((tensor == tensor[:, :1, :1]).all()), "a slot is copied as a whole"
    return tensor[:, 0, 0].tolist()


def test_moves_read_everything_before_they_write() -> None:
    made = store()
    made.move((2, 4, 1), (4, 1, 2))  # every source is also a target
    assert slots_of(made.keys[0]) == [0, 4, 1, 3, 2, 5]
    assert slots_of(made.keys[1]) == [10, 14, 11, 13, 12, 15]
    assert slots_of(made.values[1]) == [-10, -14, -11, -13, -12, -15]


def test_pages_come_back_from_the_host_wherever_there_is_room() -> None:
    made = store()
    made.swap((2, 0), (0, 1), 2, back=False)
    made.move((1, 1, 1, 1), (0, 2, 4, 5))
    assert slots_of(made.keys[1]) == [11, 11, 11, 13, 11, 11]
    made.swap((1, 2), (1, 0), 2, back=True)
    assert slots_of(made.keys[0]) == [1, 1, 0, 1, 4, 5]
    assert slots_of(made.values[1]) == [-11, -11, -10, -11, -14, -15]


def test_the_cache_writes_one_layer_at_the_packs_slots_and_shows_its_whole_store() -> None:
    made = store()
    new = torch.arange(12.0).reshape(1, 2, 2, 3)  # [1, kv_heads, T, head_dim]
    keys, values = PoolCache(made, torch.tensor([5, 0])).update(new, -new, 1)
    assert keys is made.keys[1]
    assert values is made.values[1]
    assert torch.equal(keys[5], new[0, :, 0])
    assert torch.equal(values[0], -new[0, :, 1])
    assert slots_of(keys[1:5]) == [11, 12, 13, 14]
    assert slots_of(made.keys[0]) == [0, 1, 2, 3, 4, 5]


def test_its_size_is_that_of_keys_and_values() -> None:
    made = store()
    assert sum(each.nbytes for each in (*made.keys, *made.values)) == 2 * 2 * (6 * 2 * 3) * 4
