import torch
from _end import seed, show
from torch import nn

seed(25)
table, bag, head = nn.Embedding(50, 8, sparse=True), nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 3)
sparse = torch.optim.SparseAdam([*table.parameters(), *bag.parameters()], lr=1e-2)
dense = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(10):
    ids, y = torch.randint(0, 50, (6, 4)), torch.randint(0, 3, (6,))
    loss = nn.functional.cross_entropy(head(table(ids).mean(1) + bag(ids)), y)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    print(step, repr(loss.item()), table.weight.grad.is_sparse, table.weight.grad.is_coalesced(), table.weight.grad._nnz())
show(table, bag, head)
