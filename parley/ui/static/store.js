// Conversations, kept in this browser's IndexedDB and nowhere else.

const NAME = "parley";
const TABLE = "conversations";
let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const request = work(database.transaction(TABLE, mode).objectStore(TABLE));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Return all conversations, the newest first. */
export async function loadConversations() {
  const all = await run("readonly", (table) => table.getAll());
  all.forEach(renameOldMembers);
  return all.sort((one, other) => other.changed - one.changed);
}

export const saveConversation = (conversation) => run("readwrite", (table) => table.put(structuredClone(conversation)));
export const deleteConversation = (id) => run("readwrite", (table) => table.delete(id));

/** Give a conversation that an earlier version saved the present names: the images of a message were ``pictures``. */
function renameOldMembers(conversation) {
  for (const message of conversation.panes.flatMap((pane) => pane.messages)) {
    if (!message.pictures) continue;
    message.images = message.pictures;
    delete message.pictures;
  }
}
